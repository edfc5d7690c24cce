"""What a newcomer sees: the first run of a fresh installation, with nothing compiled, measured or learnt."""

import os
import re
import subprocess
import sys

from patience import PATIENCE
from slipstream.loading import embedded


def fresh_cache(folder):
    """A cache folder that holds the model alone."""
    (folder / "models").mkdir(parents=True)
    (folder / "models" / embedded.folder().name).symlink_to(embedded.folder())
    return str(folder)


def test_the_first_answer_on_a_fresh_machine_is_drafted(tmp_path, smol):  # noqa: ARG001  (the model is there)
    """By tokens per step, since time is the machine's. Compiling was once charged to `auto`, which then rested: 1.0."""
    fresh = {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "SLIPSTREAM_CACHE": fresh_cache(tmp_path / "cache")}
    hasty = {"NUMBA_OPT": "0"}  # compiling still takes many times what a step takes
    words = [sys.executable, "-m", "slipstream", "demo", "-n", "32"]
    environment = {**os.environ, **hasty, **fresh}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert any((tmp_path / "numba").rglob("*.nbi"))  # it did compile
    found = re.search(r"slipstream \(auto\).* ([0-9.]+) tokens per step", done.stdout)
    assert found
    assert float(found[1]) > 1.5
    assert "the texts are identical" in done.stdout


LATE = """
import gc, sys
from numba.core.dispatcher import Dispatcher
import slipstream
from slipstream.datastores.live import LiveText

def known():
    every = [f for f in gc.get_objects() if isinstance(f, Dispatcher) and f.__module__.startswith("slipstream")]
    return {f"{f.__module__}.{f.__name__}{s}" for f in every for s in f.signatures}

with slipstream.load(dtype="bfloat16") as llm:
    before = known()
    llm.generate(["Name three rivers.", "Write a poem about the rain in Spain."], max_new_tokens=24)
    llm.generate("Count to twenty: one, two, one, two, one, two,", max_new_tokens=24)
    llm.generate("The river runs through the valley. " * 100, max_new_tokens=24)
    live = LiveText()
    for length in (1, 512, 511, 1024):
        live.extend([7] * length)
    print(*sorted(known() - before), sep="\\n")
"""


def test_nothing_is_left_to_be_compiled_by_the_first_answers(tmp_path, smol):  # noqa: ARG001
    environment = {**os.environ, "SLIPSTREAM_CACHE": fresh_cache(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LATE], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
