"""Ray's workers give what one machine gives. In an environment of its own: `make test-ray`."""

import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from killing import kill_a_worker
from ray.cluster_utils import Cluster

import ray
from slipstream.cluster import RETRIES, RayWorkers
from slipstream.datastores.durable.store import Store
from slipstream.datastores.ingest.encoding import Encoder
from slipstream.datastores.ingest.sharded import ingest_sharded
from slipstream.datastores.ingest.sources import find_sources
from slipstream.errors import ClusterError, OptionError
from slipstream.workers import results
from test_sharded import SEGMENT, Letters, local, segments, text


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Three machines of one core each."""
    there = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        there.add_node(num_cpus=1)
    ray.init(there.address, log_to_driver=False)
    yield there
    ray.shutdown()
    there.shutdown()


def number():
    return 7


def plus(own, job):
    return own + job


def refused(own, job):
    raise OptionError(f"{own} and {job} don't go together")


def dies_once(own, job):
    """Kills its worker the first time."""
    path = Path(job)
    if not path.exists():
        path.write_text("tried")
        os.kill(os.getpid(), signal.SIGKILL)
    return own


def dies(_own, _job):
    os.kill(os.getpid(), signal.SIGKILL)


def workers(load=number):
    return RayWorkers("auto", load)


def test_results_come_in_order():
    assert workers().count == 3
    assert list(results(workers(), plus, range(20))) == list(range(7, 27))


def test_what_the_work_raises_is_raised():
    with pytest.raises(OptionError, match=r"^7 and 1 don't go together$"):
        workers().submit(refused, 1).result()


def test_who_dies_is_done_again(tmp_path):
    assert list(results(workers(), dies_once, [tmp_path / "a", tmp_path / "b"])) == [7, 7]


def test_who_always_dies_is_an_error(monkeypatch):
    monkeypatch.setattr("slipstream.cluster.RETRIES", 1)
    assert RETRIES > 1
    with pytest.raises(ClusterError, match="was lost 2 times"):
        workers().submit(dies, 1).result()


def slow_letters():
    return Encoder(Slow())


class Slow(Letters):
    def __call__(self, text, **_):
        time.sleep(0.02)
        return super().__call__(text)


def test_a_build_while_workers_and_a_machine_die(cluster, tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for i in range(120):
        (tmp_path / "texts" / f"{i:03}.txt").write_text(text(rng, int(rng.integers(0, 900))))
    sources = find_sources([tmp_path / "texts"])
    one = local(tmp_path / "one", sources)
    told, killed = [], []

    def progress(done, _of, _tokens):
        told.append(done)
        if len(told) % 8 == 3:
            killed.append(kill_a_worker(random.Random(len(told))))
        if len(told) == 10:
            cluster.remove_node(cluster.list_all_nodes()[-1])

    with Store.create(tmp_path / "many", 256, "print", segment_tokens=SEGMENT) as store:
        many = ingest_sharded(store, sources, workers(slow_letters), progress=progress, shard_bytes=900)
    assert sum(killed) >= 3
    assert many == one
    assert segments(tmp_path / "one") == segments(tmp_path / "many")
    cluster.add_node(num_cpus=1)


def test_answers_are_those_of_one_machine(tmp_path):
    from slipstream.training.collect import CollectSettings, collect, collect_shared
    from slipstream.training.prompts import Question

    questions = [Question((f"Say {word}.",)) for word in ("one", "two", "three", "four", "five")]
    settings = CollectSettings(max_new_tokens=8, temperature=0.7, seed=3)
    collect(llm(), questions, tmp_path / "one.jsonl", settings)
    shared = collect_shared(workers(llm), questions, tmp_path / "many.jsonl", settings, portion=2)
    assert shared.conversations == 5
    lines = [sorted(path.read_text().splitlines()) for path in (tmp_path / "one.jsonl", tmp_path / "many.jsonl")]
    assert lines[0] == lines[1]


def test_vectors_are_those_of_one_machine(tmp_path, monkeypatch):
    """Byte by byte, whatever number of threads a worker was told to use: how a product is shared changes its sums."""
    from slipstream.datastores.dense.build import EmbedSettings, embed
    from slipstream.datastores.dense.reading import reader

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    rng, settings = np.random.default_rng(0), EmbedSettings(sample=400, chunk_tokens=200)
    documents = [rng.integers(0, 40_000, n) for n in (50, 90, 60, 70, 120, 200, 30, 80)]
    for name, others in (("one", None), ("many", workers(partial(reader, model)))):
        with Store.create(tmp_path / name, 49152) as store:
            for document in documents:
                store.append(document)
            embed(store, [model], settings, workers=others)
    files = [sorted((tmp_path / name / "dense").glob("*")) for name in ("one", "many")]
    for one, many in zip(*files, strict=True):
        assert one.name == many.name
        if one.suffix in (".part", ".vec"):
            assert one.read_bytes() == many.read_bytes(), one.name


def llm():
    import slipstream

    return slipstream.load(drafter="none", max_batch=2)


def model():
    from slipstream.loading.models import load_model

    return load_model(None)[0]
