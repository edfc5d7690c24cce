"""bench/series.py, which runs many measurements on one machine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from series import Series, main, read_series

JOBS = """# a comment
WORDS=one two

first busy 20
    echo $WORDS > $OUT/words

second busy 20 first
    cat $OUT/words

broken busy 20
    echo before
    false
    echo after

lost busy 20 broken/file
    echo never

alone quiet 20
    python -c 'print(2 * 21)'

late busy 20 never-there
    echo never
"""


def test_jobs_wait_for_what_they_need_and_a_failure_stops_nothing_else(tmp_path):
    jobs, values = read_series(JOBS)
    series = Series(jobs[:-1], tmp_path, values, beside=4, apart=0, minutes=1)
    series.run()
    assert [job.state for job in jobs[:-1]] == ["ended", "ended", "failed", "left out", "ended"]
    assert (tmp_path / "second.txt").read_text() == "one two\n"
    assert (tmp_path / "broken.txt").read_text() == "before\n"
    assert (tmp_path / "alone.txt").read_text() == "42\n"
    told = [line.split("s  ", 1)[1] for line in (tmp_path / "series.txt").read_text().splitlines()]
    assert told.index("first begins") < told.index("second begins") < told.index("alone begins")
    assert not any(line.startswith("lost begins") for line in told)

    again, _ = read_series(JOBS)  # what succeeded is not run again; no time is left for the others
    Series(again, tmp_path, values, beside=4, apart=0, minutes=0).run()
    assert [job.state for job in again] == ["ended", "ended", "left out", "left out", "ended", "left out"]


def test_values_come_before_or_after_options(tmp_path, monkeypatch):
    file = tmp_path / "some.series"
    file.write_text("ONE=1\n\nsaid busy 20\n    echo $ONE $TWO $THREE\n")
    monkeypatch.setattr(sys, "argv", ["series.py", str(file), "TWO=2", "--out", str(tmp_path), "THREE=3"])
    main()
    assert (tmp_path / "said.txt").read_text() == "1 2 3\n"
