"""Work that is shared: order, how much is asked for ahead, and what happens without Ray."""

import sys
from concurrent.futures import Future

import pytest

from commands import command
from slipstream.workers import Here, results


class Later:
    """Workers who finish when they are asked to, and note how much they were given."""

    count = 2

    def __init__(self):
        self.given, self.futures = [], []

    def submit(self, _work, job):
        self.given.append(job)
        self.futures.append(Future())
        if len(self.futures) > 3:
            self.futures[-4].set_result(job - 3)
        return self.futures[-1]


def test_here_the_work_gets_what_was_loaded():
    assert list(results(Here(lambda: 10), lambda own, job: own + job, [1, 2, 3])) == [11, 12, 13]


def test_results_come_in_order_and_little_is_asked_for_ahead():
    workers = Later()
    found = results(workers, None, iter(range(100)))
    assert [next(found) for _ in range(10)] == list(range(10))
    assert len(workers.given) <= 10 + 2 * workers.count + 1
    left = workers.futures[-1]
    found.close()
    assert left.cancelled()


@pytest.mark.parametrize(
    "words",
    [
        "collect -p afile --out o",
        *(pytest.param(w, marks=pytest.mark.slow) for w in ("store build --out new afile", "store embed new")),
    ],
)
def test_without_ray_it_says_what_to_install(words, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "afile").write_text('{"prompt": "some text"}')
    command("store", "build", "afile", "--out", "new", folder=tmp_path) if "embed" in words else None
    code, _, complaint = command(*words.split(), "--ray", "local", folder=tmp_path)
    assert code == 2
    assert "slipstream-llm[ray]" in complaint
