"""The libraries behind dense retrieval: graphs of large groups and a vector database find what exact search finds."""

import numpy as np
import pytest
import torch

from slipstream import LLM
from slipstream.datastores.dense import index, remote
from slipstream.datastores.dense.build import EmbedSettings, embed
from slipstream.datastores.dense.finding import Asked, HostFinder
from slipstream.datastores.dense.live_vectors import Own
from slipstream.datastores.dense.nearest import Vectors
from slipstream.datastores.dense.remote import RemoteFinder, upload
from slipstream.datastores.durable.store import Document, Store
from slipstream.errors import DamagedError, OptionError, StoreError
from test_dense import SMALL, texts
from trials import embedded_answers

pytestmark = pytest.mark.filterwarnings("ignore:Payload indexes have no effect")


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama")


def make(folder, documents, model):
    store = Store.create(folder, 64)
    store.extend(Document(d, f"s{i}") for i, d in enumerate(documents))
    embed(store, [lambda: model], SMALL)
    return store


# ---- graphs


@pytest.fixture
def linked(model, tmp_path, monkeypatch):
    """A store whose groups are large at 100 vectors."""
    monkeypatch.setattr(index.write_graphs, "__defaults__", (100, None))
    store = make(tmp_path, texts([2000, 900], seed=1), model)
    yield store
    store.close()


def test_large_groups_get_graphs_that_find_nearly_all(linked):
    view, sizes = Vectors(linked).view(), np.diff(Vectors(linked).view().parts[0].starts)
    names = {path.name for path in (linked.folder / "dense").glob("*.graph")}
    assert names == {f"00000001.{token}.graph" for token in np.flatnonzero(sizes > 100)}
    assert len(names) > 10
    rng = np.random.default_rng(0)
    right = []
    for root in range(3, 20):
        for _ in range(5):
            query = rng.standard_normal(8).astype(np.float32)
            exact, found = view.search(query, root, 10, exact=True), view.search(query, root, 10)
            right.append(len(set(exact.row.tolist()) & set(found.row.tolist())) / len(exact))
            assert (np.diff(found.similarity) <= 0).all()
    assert np.mean(right) > 0.98


@pytest.mark.slow
def test_a_graph_looks_as_far_as_its_vectors_need(monkeypatch):
    """Vectors in all directions have no neighbourhoods, and more of them must be looked at than of clusters."""
    monkeypatch.setattr(index, "LOOKED", (12, 24, 48, 96, 192, 384))
    monkeypatch.setattr(index, "FOUND", 0.98)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((20, 48))
    far = {}
    for name, spread in {"clusters": 0.1, "anywhere": 100.0}.items():
        points = centres[rng.integers(0, 20, 4000)] + spread * rng.standard_normal((4000, 48))
        vectors = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float16)
        stored, asked = vectors[:-100], vectors[-100:].astype(np.float32)
        data, far[name] = index.graph_of(stored)
        graph = index.Graph(data, 48, far[name])
        similar = asked @ stored.astype(np.float32).T
        tenth = np.sort(similar, 1)[:, -10]
        right = [(similar[i, graph.near(query, 10)] >= tenth[i]).mean() for i, query in enumerate(asked)]
        assert np.mean(right) > 0.96, name
    assert far["clusters"] < far["anywhere"] < index.LOOKED[-1]


def test_what_a_graph_needs_is_kept_with_it(linked, monkeypatch):
    monkeypatch.setattr(index, "_enough", lambda *_: 321)
    path = next((linked.folder / "dense").glob("*.graph"))
    path.unlink()
    part = Vectors(linked).view().parts[0]
    index.write_graphs(part, 100)
    token = int(path.name.split(".")[1])
    assert index.Graphs(part).get(token, int(np.diff(part.starts)[token]))._index.expansion_search == 321


def test_graphs_know_nothing_of_what_was_removed(linked):
    linked.remove("s1")
    view = Vectors(linked).view()
    gone = view.places[0][:, 0] < 0
    assert gone.sum() == 1
    for root in range(3, 20):
        found = view.search(np.ones(8, np.float32), root, 10)
        assert len(found) == 10
        assert not gone[view.parts[0].document[found.row]].any()


def test_a_damaged_or_missing_graph_is_made_anew(linked, model):
    path = next((linked.folder / "dense").glob("*.graph"))
    root, whole = int(path.name.split(".")[1]), path.read_bytes()
    path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    with pytest.raises(DamagedError, match=r"graph: page 1 is damaged"):
        Vectors(linked).view().search(np.ones(8, np.float32), root, 3)
    embed(linked, [lambda: model], SMALL)
    assert len(Vectors(linked).view().search(np.ones(8, np.float32), root, 3)) == 3
    path.unlink()
    assert len(Vectors(linked).view().search(np.ones(8, np.float32), root, 3)) == 3
    embed(linked, [lambda: model], SMALL)
    assert path.exists()
    (linked.folder / "dense" / "00000077.5.graph").write_bytes(b"")  # of a part that is no more
    embed(linked, [lambda: model], SMALL)
    assert not (linked.folder / "dense" / "00000077.5.graph").exists()


# ---- the database: slow, since its client takes a second to import


@pytest.fixture
def client():
    from qdrant_client import QdrantClient

    return QdrantClient(":memory:")


@pytest.mark.slow
def test_a_database_finds_what_the_files_do(client, model, tmp_path):
    with make(tmp_path, texts([80, 70, 60]), model) as store:
        store.append(texts([50], seed=9)[0])
        embed(store, [lambda: model], SMALL)
        vectors, told = Vectors(store), []
        assert upload(vectors, "default", client, lambda *given: told.append(given)) == (4, 0)
        assert told[-1] == (252, 252)
        assert client.count("slipstream-default").count == 252
        host = HostFinder(vectors, 5, 4)
        far = RemoteFinder(client, vectors.manifest.origin, vectors.transform, 5, 4)
        torch.manual_seed(0)
        own = Own()
        own.extend([5, 6, 7, 5, 6], vectors.transform(torch.randn(5, 32)))
        asked = [Asked("default", torch.randn(32), root) for root in (*range(3, 20), 63)]
        asked += [Asked("default", torch.randn(32), 6, own), Asked("default", torch.randn(32), 50, own)]
        for a, b in zip(host.near(asked), far.near(asked), strict=True):
            np.testing.assert_allclose(a.similarity, b.similarity, atol=1e-4)
            assert [t.tolist() for t in a.tokens] == [t.tolist() for t in b.tokens]
        assert far.near([]) == []


@pytest.mark.slow
def test_an_upload_goes_on_and_follows_the_store(client, model, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "AT_ONCE", 50)
    with make(tmp_path, texts([80, 70, 60]), model) as store:
        upsert, left = client.upsert, [3]

        def failing(*given, **more):
            if not left[0]:
                raise ConnectionError
            left[0] -= 1
            return upsert(*given, **more)

        monkeypatch.setattr(client, "upsert", failing)
        with pytest.raises(ConnectionError):  # the second document is there but for its first position
            upload(Vectors(store), "default", client)
        left[0] = 100
        assert upload(Vectors(store), "default", client) == (2, 0)
        assert client.count("slipstream-default").count == 204
        store.remove("s0")
        assert upload(Vectors(store), "default", client) == (0, 1)
        assert client.count("slipstream-default").count == 204 - 78


@pytest.mark.slow
def test_the_drafter_asks_the_database(model, tmp_path):
    folder = str(tmp_path / "database")
    with Store.open(embedded_answers(model)) as store:
        upload(Vectors(store), "default", folder)
        (text, *_) = (t.tolist() for t in store.documents())
    near = LLM(model, drafter="dresd", store=embedded_answers(model))
    far = LLM(model, drafter="dresd", store=embedded_answers(model), database=folder)
    a, b = (llm.generate(text[:10], max_new_tokens=15) for llm in (near, far))
    assert a.tokens == b.tokens
    assert a.stats.accepted == b.stats.accepted > 5


@pytest.mark.slow
def test_a_database_of_another_model_or_of_nothing_is_refused(client, model, tmp_path):
    with make(tmp_path, texts([40]), model) as store:
        vectors = Vectors(store)
        finder = RemoteFinder(client, vectors.manifest.origin, vectors.transform, 5, 4)
        with pytest.raises(StoreError, match="no collection 'slipstream-default'"):
            finder.near([Asked("default", torch.randn(32), 5)])
        upload(vectors, "default", client)
        from dataclasses import replace

        other = replace(vectors.manifest.origin, weights="0123456789abcdef", model="other")
        stranger = RemoteFinder(client, other, vectors.transform, 5, 4)
        with pytest.raises(StoreError, match=r"states of LlamaForCausalLM .* from other \(float32, layer 3"):
            stranger.near([Asked("default", torch.randn(32), 5)])
        with pytest.raises(OptionError, match="length=33: the database keeps 32"):
            RemoteFinder(client, other, vectors.transform, 5, 33)
    with pytest.raises(OptionError, match="leave out database"):
        LLM(model, drafter="dresd", store=str(tmp_path), database=client, unfiltered=True)


def test_settings_name_what_is_out_of_range():
    with pytest.raises(OptionError, match="must be at least 1"):
        EmbedSettings(dims=0)
