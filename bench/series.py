"""Many measurements on one machine in a given time: python bench/series.py bench/gpu.series --out FOLDER NAME=VALUE…

A series is a file of jobs in the order in which they begin. A job is a line `NAME KIND SECONDS [NEEDED…]` and, indented
below it, its commands for bash. They see the NAME=VALUEs of the command line, else of the file, and OUT, the folder;
`python` and `slipstream` are this Python's. A job's kind:

    quiet   alone, after all earlier jobs
    busy    beside up to --beside others
    apart   on the last --apart cores from its turn on, beside whatever comes; nothing else runs there

A job waits until the NEEDED files are there (names within OUT, or jobs that must have ended), and is stopped after its
SECONDS. It prints to OUT/NAME.txt and gets OUT/cache/NAME as its cache, quiet jobs OUT/cache/quiet, with the models of
the present one: what is learnt in a crowd is remembered by nobody else. OUT/series.txt tells what began and ended when.
Run again with the same OUT, it leaves out what succeeded. After --minutes nothing new begins.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Literal

from slipstream.kept import cache_folder

KINDS = ("quiet", "busy", "apart")
WORDS = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}; slipstream() {{ python -m slipstream "$@"; }}\n'
GRACE = 10.0  # seconds between an interrupt, after which a job tells what it has, and its end
SHARED = ("models", "corpus", "prepared")  # of the cache: what does not depend on who filled it


@dataclass
class Job:
    name: str
    kind: str
    seconds: float
    needed: list[str]
    commands: str
    state: Literal["waiting", "running", "ended", "failed", "left out"] = "waiting"
    process: subprocess.Popen[bytes] | None = None
    begun: float = field(default=0.0)

    @property
    def over(self) -> bool:
        return self.state not in ("waiting", "running")


def read_series(text: str) -> tuple[list[Job], dict[str, str]]:
    jobs, values = [], {}
    for block in re.findall(r"^[^\s#].*\n(?:[ \t].*\n)*", text, flags=re.M):
        head, _, commands = block.partition("\n")
        if value := re.fullmatch(r"(\w+)=(.*)", head):
            values[value[1]] = value[2]
            continue
        name, kind, seconds, *needed = head.split()
        if kind not in KINDS:
            raise SystemExit(f"{name}: {kind} is no kind of job: {', '.join(KINDS)}")
        jobs.append(Job(name, kind, float(seconds), needed, commands))
    return jobs, values


class Series:
    def __init__(self, jobs: list[Job], out: Path, values: dict[str, str], beside: int, apart: int, minutes: float):
        self.jobs, self.out, self.beside = jobs, out, beside
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", **values, "OUT": str(out)}
        cores = sorted(os.sched_getaffinity(0))
        apart = apart if any(job.kind == "apart" for job in jobs) else 0
        self.apart, self.cores = set(cores[len(cores) - apart :]), set(cores[: len(cores) - apart])
        self.clock, self.end = monotonic(), monotonic() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)
        for job in jobs:
            if (out / f"{job.name}.done").exists():
                job.state = "ended"

    def tell(self, text: str) -> None:
        with (self.out / "series.txt").open("a") as file:
            print(f"{monotonic() - self.clock:6.0f} s  {text}", file=file)

    def run(self) -> None:
        while not all(job.over for job in self.jobs):
            for job in self.jobs:
                if job.state == "running":
                    self.look(job)
            self.begin_what_may()
            sleep(0.2)
        self.tell("all ended")

    def begin_what_may(self) -> None:
        for place, job in enumerate(self.jobs):
            before = [other for other in self.jobs[:place] if not other.over and other.kind != "apart"]
            if job.kind == "quiet" and before and not job.over:
                return  # nothing overtakes it
            if job.state == "waiting":
                if monotonic() + job.seconds / 2 > self.end or any(self.lost(name) for name in job.needed):
                    job.state = "left out"
                    self.tell(f"{job.name} left out")
                elif all(self.there(name) for name in job.needed) and self.free(job):
                    self.begin(job)
            if job.kind == "quiet" and not job.over:
                return

    def job(self, name: str) -> Job | None:
        return next((job for job in self.jobs if job.name == name), None)

    def there(self, name: str) -> bool:
        job = self.job(name)
        return job.over if job else (self.out / name).exists()

    def lost(self, name: str) -> bool:
        """Whether this file won't come any more: it belongs to a job that has ended without it."""
        maker = self.job(Path(name).parts[0])
        return maker is not None and maker.over and maker.name != name and not (self.out / name).exists()

    def free(self, job: Job) -> bool:
        running = [other for other in self.jobs if other.state == "running" and other.kind != "apart"]
        return job.kind == "apart" or len(running) < (1 if job.kind == "quiet" else self.beside)

    def begin(self, job: Job) -> None:
        cache = self.out / "cache" / ("quiet" if job.kind == "quiet" else job.name)
        cache.mkdir(parents=True, exist_ok=True)
        for name in SHARED:
            if (cache_folder() / name).exists() and not (cache / name).exists():
                (cache / name).symlink_to(cache_folder() / name)
        cores = self.apart if job.kind == "apart" else self.cores
        job.process = subprocess.Popen(
            ["bash", "-euc", WORDS + job.commands],
            stdin=subprocess.DEVNULL,
            stdout=(self.out / f"{job.name}.txt").open("wb"),
            stderr=subprocess.STDOUT,
            env={**self.environment, "SLIPSTREAM_CACHE": str(cache)},
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        job.state, job.begun = "running", monotonic()
        self.tell(f"{job.name} begins")

    def look(self, job: Job) -> None:
        assert job.process is not None
        took, code = monotonic() - job.begun, job.process.poll()
        if code is not None:
            job.state = "failed" if code else "ended"
            if code == 0:
                (self.out / f"{job.name}.done").touch()
            self.tell(f"{job.name} {job.state} after {took:.0f} s" + (f": {code}" if code else ""))
        elif took > job.seconds + GRACE:
            os.killpg(job.process.pid, signal.SIGKILL)
        elif took > job.seconds:
            os.killpg(job.process.pid, signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", type=Path)
    parser.add_argument("values", nargs="*", metavar="NAME=VALUE", help="for the commands")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=28)
    parser.add_argument("--beside", type=int, default=4, help="busy jobs at a time")
    parser.add_argument("--apart", type=int, default=2, help="cores for the jobs that run apart")
    parser.add_argument("--only", nargs="*", help="these jobs, in this order, and no others")
    given = parser.parse_intermixed_args()  # values may come after options
    jobs, values = read_series(given.series.read_text())
    if given.only:
        jobs = sorted([job for job in jobs if job.name in given.only], key=lambda job: given.only.index(job.name))
    values |= dict(value.split("=", 1) for value in given.values)
    Series(jobs, given.out.resolve(), values, given.beside, given.apart, given.minutes).run()


if __name__ == "__main__":
    main()
