"""Dense retrieval: the maths equal numpy's, a search equals brute force, and what was read is never lost or mixed."""

import json
import logging
import os
import shutil
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from families import tiny_model
from slipstream import LLM
from slipstream.cli.embed import embed as command
from slipstream.datastores.dense import index
from slipstream.datastores.dense.arrays import Mapped, writing
from slipstream.datastores.dense.build import EmbedSettings, embed
from slipstream.datastores.dense.device import NONE, DeviceFinder, packed, unpacked
from slipstream.datastores.dense.finding import Asked, HostFinder
from slipstream.datastores.dense.live_vectors import Own
from slipstream.datastores.dense.nearest import Drafts, Vectors
from slipstream.datastores.dense.reading import Reader, batches, windows
from slipstream.datastores.dense.texts import TextIndex
from slipstream.datastores.dense.transform import Moments
from slipstream.datastores.dense.vector_manifest import Origin, VectorManifest, read_manifest
from slipstream.datastores.dense.vectors import chunks, keys_of, read_transform
from slipstream.datastores.durable.pages import PAGE, checksum
from slipstream.datastores.durable.store import Document, Store
from slipstream.datastores.ingest.answers import add_answers
from slipstream.datastores.sparse.runs import Run, Runs
from slipstream.drafters.dresd import HEAT, OTHERS, tree_of
from slipstream.errors import DamagedError, DrafterError, OptionError, StoreError
from slipstream.targets import Want, open_target
from test_collect import letters
from trials import embedded_answers

SMALL = EmbedSettings(dims=8, window=60, overlap=20, sample=150, batch_tokens=256, chunk_tokens=80)


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama")


def texts(lengths, seed=0):
    """Random documents with few different tokens, so that groups are not too small."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 20, n) for n in lengths]


def make(folder, documents, model=None, settings=SMALL):
    store = Store.create(folder, 64)
    store.extend(Document(d, f"s{i}") for i, d in enumerate(documents))
    if model is not None:
        embed(store, [lambda: model], settings)
    return store


def contents(store):
    """{(collection, digest, offset): (next token, vector)} of all parts."""
    found = {}
    folder = store.folder / "dense"
    for part in Vectors(store)._parts.values():
        token = np.searchsorted(part.starts, np.arange(len(part)), side="right") - 1
        for row in range(len(part)):
            key = part.collection, int(part.digests[part.document[row]]), int(part.offset[row])
            assert key not in found, "a position has two vectors"
            found[key] = int(token[row]), part.vectors[row].tolist()
    assert not [path.name for path in folder.iterdir() if path.suffix in (".making", ".chunk", ".states")]
    return found


def brute(view, query, root, count):
    """What a search must find: similarity and (digest, offset), the best first."""
    rows = []
    for number, part in enumerate(view.parts):
        first, last = part.group(root)
        for row in range(first, last):
            if view.alive[number][part.document[row]]:
                similarity = float(part.vectors[row].astype(np.float32) @ query)
                rows.append((similarity, number, row))
    rows.sort(key=lambda r: (-r[0], r[1], r[2]))
    return rows[:count]


# ---- the maths


def test_the_transform_is_that_of_numpys_singular_values():
    rng = np.random.default_rng(0)
    states = rng.standard_normal((500, 3)) @ rng.standard_normal((3, 12)) + 0.1 * rng.standard_normal((500, 12))
    states = states * np.geomspace(0.01, 100, 12) + 1000  # of very different sizes, and far from zero
    moments = Moments(12)
    for part in np.array_split(states, 7):
        moments.add(torch.from_numpy(part).float())
    transform = moments.fit(4)

    z = (states - states.mean(0)) / states.std(0)
    _, values, components = np.linalg.svd(z, full_matrices=False)
    np.testing.assert_allclose(transform.explained, values[:4] ** 2 / (values**2).sum(), rtol=1e-3)
    expected = z @ components[:4].T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    given = transform(torch.from_numpy(states).float()).numpy()
    agree = np.sign((expected * given).sum(0))  # an eigenvector may point either way
    np.testing.assert_allclose(given * agree, expected, atol=2e-2)
    np.testing.assert_allclose(np.linalg.norm(given, axis=1), 1, atol=1e-5)


def test_a_worked_transform():
    """Two numbers that always agree, in different units: one component has all, and only the direction is left."""
    moments = Moments(2)
    moments.add(torch.tensor([[0.0, 10.0], [1.0, 30.0], [2.0, 50.0]]))
    transform = moments.fit(1)
    assert transform.explained.tolist() == pytest.approx([1.0])
    assert transform(torch.tensor([[5.0, 110.0], [-1.0, -10.0]])).tolist() == [[1.0], [-1.0]]
    # z-scores of (2, 50) are (1.2247, 1.2247), along (1, 1)/√2
    assert transform.project(torch.tensor([2.0, 50.0])).tolist() == pytest.approx([3**0.5], rel=1e-4)
    centred = moments.fit(1, standardise=False)  # the larger unit wins
    assert centred.components[:, 0].tolist() == pytest.approx([0.05, 1.0], abs=2e-3)


def test_what_can_not_be_fitted_is_refused():
    with pytest.raises(StoreError, match="two states at least, found 0"):
        Moments(3).fit(2)
    with pytest.raises(StoreError, match="not finite"):
        Moments(2).add(torch.tensor([[1.0, torch.nan]]))


# ---- files


def test_a_file_is_whole_or_absent_and_every_damaged_byte_is_found(tmp_path):
    path = tmp_path / "a.part"
    rows = np.arange(3000, dtype=np.float16).reshape(-1, 3)
    plan = {"rows": (np.float16, rows.shape), "none": (np.uint32, (0,))}
    with pytest.raises(RuntimeError), writing(path, {}, plan):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with writing(path, {"about": "x"}, plan) as into:
        into["rows"][:] = rows
    whole = path.read_bytes()
    file = Mapped(path)
    assert file.facts["about"] == "x"
    np.testing.assert_array_equal(file["rows"], rows)
    assert file["none"].shape == (0,)
    for at in (3, 30, 4096, 8191, 9000, len(whole) - 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedError, match=r"a\.part"):
            Mapped(path)["rows"]
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedError, match=f"{len(whole) - 1} bytes instead of {len(whole)}"):
        Mapped(path)


def test_only_the_pages_that_are_read_are_checked(tmp_path):
    path = tmp_path / "a.part"
    with writing(path, {}, {"rows": (np.uint8, (3, 4096))}) as into:
        into["rows"][:] = 7
    data = bytearray(path.read_bytes())
    data[2 * 4096 + 5] = 8
    path.write_bytes(data)
    file = Mapped(path)
    file.check("rows", 0, 1)
    file.check("rows", 2, 3)
    with pytest.raises(DamagedError, match="page 2 is damaged, in its rows"):
        file.check("rows", 1, 3)


# ---- reading


def test_a_chunk_of_odd_facts_is_removed(tmp_path):
    manifest = VectorManifest(Origin("m", "0" * 16, "float32", 1, 16), 64, 8, 64, 16)
    for number, dtype in enumerate(({"a": 1}, ["float16"], None, "int3")):
        with writing(tmp_path / f"{number}.chunk", {"collection": "default", "dtype": dtype}, {}):
            pass
    assert chunks(tmp_path, "chunk", manifest) == []
    assert not list(tmp_path.iterdir())


def test_windows_cover_every_position_once_with_context_before_it():
    assert list(windows([5, 0, 13], 6, 2)) == [(0, 0, 5, 0), (2, 0, 6, 0), (2, 4, 10, 6), (2, 8, 13, 10)]
    rng = np.random.default_rng(0)
    for _ in range(50):
        window = int(rng.integers(1, 20))
        overlap, counts = int(rng.integers(0, window)), rng.integers(0, 60, 4).tolist()
        pieces = list(windows(counts, window, overlap))
        assert [(d, p) for d, _, end, keep in pieces for p in range(keep, end)] == [
            (d, p) for d, count in enumerate(counts) for p in range(count)
        ]
        assert all(end - begin <= window and (keep == 0 or keep - begin == overlap) for _, begin, end, keep in pieces)
        together = list(batches(iter(pieces), 40))
        assert sorted(p for b in together for p in b) == sorted(pieces)
        assert all(len(b) == 1 or len(b) * max(e - s for _, s, e, _ in b) <= 40 for b in together)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba"])
def test_the_states_are_those_that_the_target_shows_its_drafters(family, tiny):
    model = tiny(family)
    documents = texts([2, 9, 30, 17])
    rows = Reader(model).rows(documents, 100, 20, 64, None)
    target, at = open_target(model), 0
    for document in documents:
        count = int(keys_of(len(document)))
        layer, slot = model.config.num_hidden_layers, target.open()
        shown = torch.cat([s.hidden[layer] for s in target.prefill(slot, document.tolist(), Want((layer,)))])
        torch.testing.assert_close(rows[at : at + count], shown[:count], atol=1e-4, rtol=1e-4)
        at += count
    assert at == len(rows)


def test_a_long_document_is_read_in_windows(model):
    """Window 60, overlap 20: position 75 was read as the 35th of the second window, with 20 tokens before its own."""
    (document,) = texts([130])
    rows = Reader(model).rows([document], 60, 20, 64, None)
    assert len(rows) == 128
    ids = torch.from_numpy(document)[None]
    for begin, end, keep in ((0, 60, 0), (40, 100, 60), (80, 128, 100)):
        with torch.no_grad():
            states = model.base_model(input_ids=ids[:, begin:end]).last_hidden_state[0]
        torch.testing.assert_close(rows[keep:end], states[keep - begin :], atol=1e-5, rtol=1e-5)


# ---- building


def test_every_position_that_can_draft_has_its_vector(model, tmp_path):
    documents = texts([1, 2, 3, 50, 100, 30])
    with make(tmp_path, documents, model) as store:
        found = contents(store)
        listed = dict(TextIndex(store.runs()).documents())
        assert {(c, d, o) for c, d, o in found} == {
            ("default", digest, offset) for digest, t in listed.items() for offset in range(max(0, len(t) - 2))
        }
        transform = read_transform(store.folder / "dense", read_manifest(store.folder / "dense"))
        assert transform.dims == 8
        manifest = read_manifest(store.folder / "dense")
        assert (manifest.window, manifest.overlap, manifest.origin) == (60, 20, Origin.of(model))
        for digest, tokens in listed.items():
            if len(tokens) > 2:
                vectors = Reader(model).rows([tokens], 60, 20, 256, transform)
                for offset, vector in enumerate(vectors):
                    following, kept = found["default", digest, offset]
                    assert following == tokens[offset + 1]
                    np.testing.assert_allclose(kept, vector, atol=2e-3)


@pytest.mark.slow
def test_a_build_killed_at_any_instant_goes_on_and_ends_the_same(model, tmp_path):
    """A process is killed just before the k-th file takes its name or goes, for every k; then another goes on."""
    documents = texts([50, 40, 30, 60, 5])
    with make(tmp_path / "calm", documents, model) as store:
        expected = contents(store)
    make(tmp_path / "store", documents).close()
    for k in range(100):
        shutil.rmtree(tmp_path / "store" / "dense", ignore_errors=True)
        child = os.fork()
        if child == 0:
            _killed_at(k, tmp_path / "store", model)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with Store.open(tmp_path / "store") as store:
            if (tmp_path / "store" / "dense" / "transform.vec").exists():
                Vectors(store).view().search_all(np.ones(8, np.float32), 9)  # what is there can be searched
            embed(store, [lambda: model], SMALL)
            assert contents(store) == expected
        if code == 0:
            break
        assert code == 9
    assert code == 0
    assert k > 10


def _killed_at(k, folder, model):
    """In a child process: k renames and removals, and then the end."""
    try:
        torch.set_num_threads(1)
        done = 0

        def counted(act, *given, **more):
            nonlocal done
            if done == k:
                os._exit(9)
            done += 1
            return act(*given, **more)

        for name in ("rename", "unlink"):
            act = getattr(Path, name)
            setattr(Path, name, lambda *given, act=act, **more: counted(act, *given, **more))
        with Store.open(folder) as store:
            embed(store, [lambda: model], SMALL)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def test_only_what_is_new_is_read(model, tmp_path, monkeypatch):
    documents = texts([50, 40, 30, 60, 20, 25, 35])
    read = []
    rows = Reader.rows
    monkeypatch.setattr(Reader, "rows", lambda self, d, *more: read.extend(map(len, d)) or rows(self, d, *more))
    with make(tmp_path / "all", documents, model, replace(SMALL, sample=140)) as store:
        everything = contents(store)
        assert sorted(read) == sorted(map(len, documents)), "each document is read once, though some are the sample"
    with make(tmp_path / "some", documents[:4], model) as store:
        transform = (store.folder / "dense" / "transform.vec").read_bytes()
        read.clear()
        for document in documents[4:]:
            store.append(document)
            told = embed(store, [lambda: model], SMALL)
            assert (told.documents, told.vectors) == (1, len(document) - 2)
        assert read == [20, 25, 35]
        assert len(read_manifest(store.folder / "dense").parts) == 4
        assert (store.folder / "dense" / "transform.vec").read_bytes() == transform
        assert contents(store).keys() == everything.keys()
        read.clear()
        store.append(documents[0])  # the same text once more
        assert embed(store, [lambda: model], SMALL) == replace(told, documents=0, vectors=0, known=7)
        assert read == []


def test_many_parts_become_one_without_what_is_gone(model, tmp_path):
    documents = texts([30, 31, 32, 33, 34, 35, 36])
    assert min(range(3), key=lambda i: checksum(documents[i].astype(np.uint16))) == 2  # so that others move up
    with make(tmp_path, documents[:3], model) as store:
        store.flush()
        for i in range(3, 7):
            store.append(documents[i], f"s{i}")
            if i == 6:
                before = contents(store)
                store.remove("s2")
            embed(store, [lambda: model], SMALL)
        (entry,) = read_manifest(store.folder / "dense").parts
        assert (entry.documents, entry.vectors) == (6, sum(len(d) - 2 for d in documents) - 30)
        after = contents(store)
        kept = {key: value for key, value in before.items() if key in after}
        assert len(kept) == len(before) - 30
        assert kept == {key: after[key] for key in kept}
        assert [path.name for path in (tmp_path / "dense").glob("*.part")] == [entry.name]


def test_parts_that_are_largely_gone_are_written_anew(model, tmp_path):
    with make(tmp_path, texts([60, 61, 40]), model) as store:
        store.flush()
        store.remove("s2")  # a quarter, nearly
        embed(store, [lambda: model], SMALL)
        assert [e.vectors for e in read_manifest(store.folder / "dense").parts] == [155]
        store.remove("s0")
        embed(store, [lambda: model], SMALL)
        assert [e.vectors for e in read_manifest(store.folder / "dense").parts] == [59]


@pytest.mark.slow
def test_several_workers_make_the_same_vectors(model, tmp_path):
    documents = texts([50, 40, 30, 60, 20])
    with make(tmp_path / "one", documents, model) as store:
        expected = contents(store)
    with make(tmp_path / "two", documents) as store:
        told = []
        embed(store, [partial(tiny_model, "llama")] * 2, SMALL, lambda *given: told.append(given))
        found = contents(store)
    assert {doing for doing, _, _ in told} >= {"sampling", "fitting", "reading", "grouping"}
    assert told[-1][1:] == (190, 190)
    assert found.keys() == expected.keys()
    for key, (following, vector) in found.items():
        assert following == expected[key][0]
        assert np.array_equal(vector, expected[key][1])


def test_vectors_do_not_depend_on_how_many_cores_read(model, tmp_path, monkeypatch):
    threads, made = torch.get_num_threads(), []
    for cores in (1, 3):
        monkeypatch.setattr("slipstream.datastores.dense.reading.cores", lambda cores=cores: cores)
        with make(tmp_path / str(cores), texts([50, 40, 30, 60, 20]), model, replace(SMALL, chunk_tokens=40)) as store:
            (part,) = (store.folder / "dense").glob("*.part")
            made.append(part.read_bytes())
    assert made[0] == made[1]
    assert torch.get_num_threads() == threads


def test_another_models_vectors_are_refused_and_both_are_named(model, tmp_path):
    other = tiny_model("llama", seed=1)
    with make(tmp_path, texts([40, 30]), model) as store:
        for stranger in (other, tiny_model("llama", dtype=torch.bfloat16)):
            with pytest.raises(
                DrafterError, match=r"states of LlamaForCausalLM \(float32, layer 3, weights .*and this"
            ):
                embed(store, [lambda stranger=stranger: stranger], SMALL)
            with pytest.raises(DrafterError) as refused:
                LLM(stranger, drafter="dresd", store=store)
            assert Origin.of(model).weights in str(refused.value)
            assert Origin.of(stranger).weights in str(refused.value)
        same = Origin.of(tiny_model("llama", dtype=torch.bfloat16))
        rounded = Origin.of(tiny_model("llama", dtype=torch.bfloat16).float())
        assert same.weights == rounded.weights
        with pytest.raises(DrafterError, match=r"\(float32, .* this is LlamaForCausalLM \(bfloat16"):
            replace(read_manifest(store.folder / "dense"), origin=rounded).expect(store.folder, same)
        with pytest.raises(StoreError, match="vectors of 8 numbers, not 16"):
            embed(store, [lambda: model], replace(SMALL, dims=16))


def test_what_is_missing_or_unfinished_is_said(model, tmp_path):
    with make(tmp_path, texts([40, 30])) as store:
        with pytest.raises(StoreError, match=r"has no vectors: `slipstream store embed"):
            LLM(model, drafter="dresd", store=store)
        embed(store, [lambda: model], SMALL)
        folder = store.folder / "dense"
        body = json.loads((folder / "dense.json").read_text())
        (folder / "dense.json").write_text(json.dumps({**body, "dims": 9}))
        with pytest.raises(DamagedError, match=r"dense.json is damaged \(its checksum is wrong\)"):
            Vectors(store)
        (folder / "dense.json").write_text(json.dumps(body))
        (folder / "transform.vec").unlink()
        with pytest.raises(DamagedError, match=r"transform\.vec is gone, and vectors that it made are there"):
            Vectors(store)
    with pytest.raises(OptionError, match="0 <= overlap < window"):
        EmbedSettings(window=10, overlap=10)
    with pytest.raises(OptionError, match=r"give its folder as store="):
        LLM(model, drafter="dresd")


def test_vectors_that_are_not_the_manifests_are_refused_and_verify_finds_them(model, tmp_path):
    with (
        make(tmp_path / "a", texts([40, 30]), model) as store,
        make(tmp_path / "b", texts([40, 30], 1), model) as other,
    ):
        small = replace(SMALL, dims=4)
        with make(tmp_path / "c", texts([40, 30]), model, small) as narrow:
            foreign = [narrow.folder / "dense", other.folder / "dense"]
        folder = store.folder / "dense"
        assert store.verify() == []
        for name in ("00000001.part", "transform.vec"):
            whole = (folder / name).read_bytes()
            for there in foreign:
                (folder / name).write_bytes((there / name).read_bytes())
                with pytest.raises(DamagedError, match=name):
                    Vectors(store).view()
                assert any(name in sentence for sentence in store.verify())
            (folder / name).write_bytes(whole)
        (folder / "00000001.part").write_bytes(whole[:PAGE] + bytes([whole[PAGE] ^ 1]) + whole[PAGE + 1 :])
        assert any("00000001.part" in sentence for sentence in store.verify())


def test_the_vectors_of_another_store_are_refused(model, tmp_path):
    with make(tmp_path / "a", texts([40, 30]), model) as store, make(tmp_path / "b", texts([40, 30])) as other:
        shutil.copytree(store.folder / "dense", other.folder / "dense")
        with pytest.raises(StoreError, match="was made for another store"):
            Vectors(other)
        with pytest.raises(StoreError, match="was made for another store"):
            embed(other, [lambda: model], SMALL)


def test_a_lost_transform_is_not_fitted_anew_beside_old_vectors(model, tmp_path):
    with make(tmp_path, texts([40, 30]), model) as store:
        (store.folder / "dense" / "transform.vec").unlink()
        store.append(texts([50], 3)[0], "new")
        with pytest.raises(DamagedError, match=r"transform\.vec is gone, and vectors that it made are there"):
            embed(store, [lambda: model], SMALL)


def test_an_empty_manifest_of_vectors_is_said(model, tmp_path):
    with make(tmp_path, texts([40, 30]), model) as store:
        (store.folder / "dense" / "dense.json").write_bytes(b"")
        with pytest.raises(DamagedError, match=r"dense\.json is damaged"):
            Vectors(store)


def test_a_full_disk_while_embedding_is_an_error(model, tmp_path, monkeypatch):
    """Room is asked for before a mapping is written to, which would end the process."""

    def full(*_):
        raise OSError(28, "No space left on device")

    with make(tmp_path, texts([40, 30])) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(StoreError, match="No space left on device"):
                embed(store, [lambda: model], SMALL)
        embed(store, [lambda: model], SMALL)
        assert store.verify() == []


def test_a_damaged_part_is_no_draft_and_is_made_anew(model, tmp_path, caplog):
    with make(tmp_path, texts([50, 40, 30]), model) as store:
        expected = contents(store)
        path = store.folder / "dense" / "00000001.part"
        data = bytearray(path.read_bytes())
        part = Vectors(store)._parts["00000001.part"]
        where = part.file._arrays["vectors"][0] + 16 * int(part.starts[7])  # in the group of token 7
        data[where] ^= 1
        path.write_bytes(data)
        view = Vectors(store).view()
        with pytest.raises(DamagedError, match=r"00000001.part: page \d+ is damaged, in its vectors"):
            view.search(np.ones(8, np.float32), 7, 3)
        with caplog.at_level(logging.WARNING, "slipstream"):
            embed(store, [lambda: model], SMALL)
        assert "its documents are read again" in caplog.text
        assert contents(store) == expected


# ---- searching


@pytest.fixture(scope="module")
def grown(model, tmp_path_factory):
    """Three parts; a document that was removed and left the store, one that was only removed; text that moved through
    segments, and some in memory."""
    documents = texts([80, 70, 60, 50, 40, 90], seed=3)
    store = make(tmp_path_factory.mktemp("grown"), documents[:3], model)
    store.flush()
    store.append(documents[3], "s3")
    embed(store, [lambda: model], SMALL)
    store.remove("s1")
    store.compact()
    store.append(documents[4], "s4")
    store.append(documents[5], "s5")
    embed(store, [lambda: model], SMALL)
    store.remove("s3")
    yield store
    store.close()


def test_a_search_equals_brute_force_over_all_parts(grown):
    vectors = Vectors(grown)
    view = vectors.view()
    assert len(view.parts) == 3
    assert [int((~alive).sum()) for alive in view.alive] == [1, 1, 0]
    rng = np.random.default_rng(0)
    for root in (*range(3, 20), 63):
        for count in (1, 4, 500):
            query = rng.standard_normal(8).astype(np.float32)
            found = view.search(query, root, count)
            expected = brute(view, query, root, count)
            np.testing.assert_allclose(found.similarity, [s for s, _, _ in expected], atol=1e-5)
            assert list(zip(found.part.tolist(), found.row.tolist(), strict=True)) == [(p, r) for _, p, r in expected]
    assert len(view.search(query, 99, 5)) == 0


def test_equal_vectors_come_in_the_order_they_stand_in(tmp_path, model):
    same = texts([12])[0]
    with make(tmp_path, [np.append(same, 4), np.append(same, 5), np.append(same, 6)], model) as store:
        view = Vectors(store).view()
        part = view.parts[0]
        first, _ = part.group(int(same[5]))
        rows = [r for r in range(*part.group(int(same[5]))) if part.offset[r] == 4]
        assert len(rows) == 3
        found = view.search(part.vectors[rows[0]].astype(np.float32), int(same[5]), 3)
        assert found.row.tolist() == rows
        assert first <= rows[0]


def test_drafts_are_what_followed_the_root_up_to_the_documents_end(grown):
    vectors = Vectors(grown)
    view = vectors.view()
    documents = {d: t for d, t in TextIndex(grown.runs()).documents()}
    rng = np.random.default_rng(1)
    ends = 0
    for root in range(3, 20):
        found = view.search(rng.standard_normal(8).astype(np.float32), root, 50)
        drafts = view.read(found, 6)
        for number, row, after in zip(found.part, found.row, drafts.tokens, strict=True):
            part = view.parts[number]
            text, at = documents[int(part.digests[part.document[row]])], int(part.offset[row])
            assert text[at + 1] == root
            assert after.tolist() == text[at + 2 : at + 8].tolist()
            ends += len(after) < 6
    assert ends > 0


def test_the_papers_way_filters_what_it_found_and_finds_fewer(grown):
    view = Vectors(grown).view()
    rng = np.random.default_rng(2)
    fewer = 0
    for root in range(3, 20):
        query = rng.standard_normal(8).astype(np.float32)
        every = view.search_all(query, 20)
        assert len(every) == 20
        kept = view.followed_by(every, root)
        best = view.search(query, root, 20)
        assert kept.row.tolist() == best.row.tolist()[: len(kept)]  # the nearest of the group are among those
        assert kept.similarity.tolist() == best.similarity.tolist()[: len(kept)]
        fewer += len(kept) < 10 <= len(best)
    assert fewer > 10


def test_the_same_search_on_a_device(grown):
    """Plain torch operations of fixed shape, here on the CPU, find what the compiled loop finds."""
    vectors = Vectors(grown)
    host, device = HostFinder(vectors, 5, 4), DeviceFinder(vectors, torch.device("cpu"), 5, 4)
    torch.manual_seed(0)
    own = Own()
    own.extend([5, 6, 7, 5, 6], vectors.transform(torch.randn(5, 32)))
    asked = [Asked("default", torch.randn(32), root) for root in (*range(3, 20), 63)]
    asked += [Asked("default", torch.randn(32), 6, own), Asked("default", torch.randn(32), 50, own)]
    asked += [Asked("nobody's", torch.randn(32), 6)]
    _equal(host.near(asked), device.near(asked))
    assert device.near([]) == []
    unknown = Asked("default", torch.full((32,), torch.nan), 6)
    assert [len(finder.near([unknown])[0].tokens) for finder in (host, device)] == [0, 0]
    ways = HostFinder(vectors, 5, 4, unfiltered=True), DeviceFinder(vectors, torch.device("cpu"), 5, 4, unfiltered=True)
    _equal(*(finder.near(asked) for finder in ways))
    assert 0 < sum(len(d.tokens) for d in ways[0].near(asked)) < 5 * len(asked)


def _equal(some, others):
    for a, b in zip(some, others, strict=True):
        np.testing.assert_allclose(a.similarity, b.similarity, atol=1e-5)
        assert [t.tolist() for t in a.tokens] == [t.tolist() for t in b.tokens]


def test_a_similarity_and_its_row_are_one_number_in_their_order():
    similarity = torch.tensor([-1.0, 0.5, -0.25, 0.5, 0.0, 1.0])
    keys = packed(similarity, torch.tensor([7, 9, 0, 4, 1, 0xFFFFFFFF]))
    best = keys.sort(descending=True).values
    values, rows = unpacked(torch.cat((best, torch.tensor([NONE, NONE + 3]))).numpy())
    assert values.tolist() == [1.0, 0.5, 0.5, 0.0, -0.25, -1.0]
    assert rows.tolist() == [0xFFFFFFFF, 4, 9, 1, 0, 7]  # of equals the earlier first


def test_vectors_are_loaded_again_only_if_they_changed(model, tmp_path):
    with make(tmp_path, texts([60, 50, 40]), model) as store:
        finder = DeviceFinder(Vectors(store), torch.device("cpu"), 3, 4)
        held = finder._load("default")
        store.flush()
        store.append(texts([30], seed=8)[0])  # has no vectors
        finder.refresh()
        asked = Asked("default", torch.ones(32), 7)
        before = HostFinder(finder.vectors, 3, 4).near([asked])[0]
        assert finder.near([asked])[0].similarity == pytest.approx(before.similarity)
        assert finder._load("default") is held
        store.remove("s1")
        finder.refresh()
        assert finder._load("default") is not held
        assert len(finder._load("default").row) == 58 + 38


def test_collections_never_mix(model, tmp_path):
    mine, yours = texts([40, 40])
    with Store.create(tmp_path, 64) as store:
        store.append(mine, collection="mine")
        store.append(yours, collection="yours")
        embed(store, [lambda: model], SMALL)
        vectors = Vectors(store)
        for name, text in (("mine", mine), ("yours", yours)):
            every = vectors.view(name).search_all(np.ones(8, np.float32), 100)
            assert len(every) == 38
            spans = {bytes(text[i : i + 4].tobytes()) for i in range(40)}
            drafts = vectors.view(name).read(every, 4)
            assert all(t.astype(text.dtype).tobytes() in spans for t in drafts.tokens if len(t) == 4)


def test_readers_see_what_was_embedded_since(model, tmp_path):
    with make(tmp_path, texts([40]), model) as store, Store.open(tmp_path) as other:
        vectors = Vectors(other)
        before = vectors.view()
        assert vectors.view() is before
        store.append(texts([30], seed=5)[0])
        embed(store, [lambda: model], SMALL)
        vectors.refresh()
        assert len(vectors.view()) == len(before) + 28
        (tmp_path / "dense" / "00000002.part").unlink()
        with pytest.raises(DamagedError, match=r"00000002.part is missing: `slipstream store embed` makes it anew"):
            Vectors(other)
        embed(store, [lambda: model], SMALL)
        assert len(Vectors(other).view()) == len(before) + 28


def test_documents_are_known_by_content_and_length():
    runs = Runs([Run.of([[5, 6, 7], [8, 9], [5, 6, 7]])])
    found = TextIndex(runs)
    listed = dict(found.documents())
    assert sorted(t.tolist() for t in listed.values()) == [[5, 6, 7], [8, 9]]
    digests = np.array([*listed, 12345], np.uint64)
    lengths = np.array([*map(len, listed.values()), 3], np.uint32)
    places = found.find(digests, lengths)
    for (_, start), tokens in zip(places[:2], listed.values(), strict=True):
        assert runs.runs[0].tokens[start : start + len(tokens)].tolist() == tokens.tolist()
    assert places[2].tolist() == [-1, -1]
    assert found.find(digests, lengths + np.uint32(1)).tolist() == [[-1, -1]] * 3
    assert TextIndex(Runs([])).find(digests, lengths).tolist() == [[-1, -1]] * 3


# ---- drafting


def test_a_worked_tree():
    """Two drafts agree on their first token, a third, less similar by 0.1, does not."""
    tokens = [np.array([4, 5]), np.array([4, 6]), np.array([7])]
    tree = tree_of(9, Drafts(np.array([1.0, 1.0, 0.9], np.float32), tokens), depth=5)
    third = np.exp(-0.1 * HEAT)
    total = 2 + third + OTHERS
    assert tree.tokens.tolist() == [9, 4, 5, 6, 7]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0]
    expected = [2 / total, 1 / (2 + OTHERS), 1 / (2 + OTHERS), third / total]
    np.testing.assert_allclose(tree.raw[1:, 0], expected, rtol=1e-4)
    assert tree.sources == ("dresd",)
    shallow = tree_of(9, Drafts(np.array([1.0, 1.0, 0.9], np.float32), tokens), depth=1)
    assert shallow.tokens.tolist() == [9, 4, 7]
    assert len(tree_of(9, Drafts(np.empty(0, np.float32), []), depth=5)) == 1


def test_a_text_that_is_in_the_store_is_drafted_from_where_it_stands(model):
    """The state that chose the root is the nearest to itself, so the first draft is what truly followed."""
    llm = LLM(model, drafter="dresd", store=embedded_answers(model), drafts=1, length=6)
    (text, *_) = (t.tolist() for _, t in TextIndex(llm.engine.drafter.store.runs()).documents())
    result = llm.generate(text[:10], max_new_tokens=15)
    assert result.tokens == text[10:25]
    assert result.stats.tokens_per_step > 4
    assert result.stats.by_source["dresd"]["proposed"] > 0


def test_the_last_state_that_was_seen_is_the_query(model, tmp_path):
    """Token 7 comes twice, followed differently: where the states before it were alike decides."""
    text = np.array([3, 4, 7, 10, 11, 12, 13, 5, 6, 7, 14, 15, 16, 17])
    with make(tmp_path, [text, *texts([60])], model) as store:
        llm = LLM(model, drafter="dresd", store=store, drafts=1, length=3)
        states = Reader(model).rows([text], 60, 20, 64, None)
        for first, last, after in ((8, 1, [10, 11, 12]), (1, 8, [14, 15, 16])):
            session = llm.engine.drafter.begin(llm.request([1, 2]))
            session.observe(_seen([1, 2], 0, states[[first, last]]))
            assert session.propose(7, _budget()).tree.tokens.tolist() == [7, *after]


def test_a_batch_is_drafted_together(model):
    store = embedded_answers(model)
    llm = LLM(model, drafter="dresd", store=store, live=True)
    prompts = [t[:8].tolist() for _, t in TextIndex(llm.engine.drafter.store.runs()).documents()]
    alone = [llm.generate(p, max_new_tokens=12) for p in prompts]
    together = llm.generate(prompts, max_new_tokens=12)
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [r.stats.accepted for r in together] == [r.stats.accepted for r in alone]


def test_the_text_itself_is_searched_if_it_is_live(model, tmp_path):
    text = [30, 31, 32, 33, 34, 35]
    with make(tmp_path, texts([40]), model) as store:
        shown = {}
        for live in (False, True):
            llm = LLM(model, drafter="dresd", store=store, live=live)
            session = llm.engine.drafter.begin(llm.request(text))
            states = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
            session.observe(_seen(text, 0, states))
            session.observe(_seen([30, 31], 6, states[:2]))  # the same state read 31 before
            shown[live] = session.propose(32, _budget()).tree
    assert len(shown[False]) == 1, "the store has no such token"
    assert shown[True].tokens.tolist() == [32, 33, 34, 35, 30, 31, 32]


def test_own_vectors_begin_where_states_were_first_seen():
    own = Own()
    own.extend([1, 2, 3, 1], None)
    own.extend([2, 3, 1], torch.eye(3))
    own.extend([2, 3], torch.eye(3)[:2])
    assert own.count(2) == 1  # after position 6; position 0 has no vector, nor has 3
    assert own.rows(2).tolist() == [[0.0, 0.0, 1.0]]
    assert [t.tolist() for t in own.after(2, 5)] == [[3, 2]]
    assert own.count(3) == 2
    assert [t.tolist() for t in own.after(3, 2)] == [[1, 2], [3]]
    assert own.count(9) == 0


def _seen(tokens, position, states):
    from slipstream.drafters.base import Hidden, Seen

    return Seen(tokens, position, Hidden({3: states}))


def _budget():
    from slipstream.budget import Budget

    return Budget(nodes=16, depth=8)


# ---- alignment


def _collected(path, sampling, tokens=((5, 6, 7, 8), (9, 10, 11))):
    lines = [{"id": str(i), "tokens": t, "model": "m", "sampling": sampling} for i, t in enumerate(tokens)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_collected_answers_become_a_store_that_knows_how_they_were_sampled(model, tmp_path, caplog):
    greedy = {"max_new_tokens": 5, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    path = _collected(tmp_path / "data.jsonl", greedy)
    with Store.create(tmp_path / "store", 64) as store:
        told = add_answers(store, path)
        assert (told.documents, told.tokens) == (2, 7)
        assert sorted(d.tolist() for d in store.documents()) == [[5, 6, 7, 8], [9, 10, 11]]
        assert store.manifest.notes["sampling"] == {"temperature": 0.0, "top_p": 1.0}
        assert add_answers(store, path).known == 1
        path.write_text(path.read_text().splitlines()[0] + "\n")
        assert add_answers(store, path).replaced == 1
        assert [d.tolist() for d in store.documents()] == [[5, 6, 7, 8]]
        warm = _collected(tmp_path / "warm.jsonl", {**greedy, "temperature": 1.0})
        with pytest.raises(OptionError, match=r"'temperature': 1.0.* with .*'temperature': 0.0.*a store for each"):
            add_answers(store, warm)
        (tmp_path / "other.jsonl").write_text('{"text": "x"}\n')
        with pytest.raises(OptionError, match="line 1 was not written by `slipstream collect`"):
            add_answers(store, tmp_path / "other.jsonl")
        for broken in ({**greedy, "temperature": 1.0}, {}):
            _collected(path, broken)
            with pytest.raises(OptionError):
                add_answers(store, path)
            assert [d.tolist() for d in store.documents()] == [[5, 6, 7, 8]]  # the old ones stay
        embed(store, [lambda: model], SMALL)
        llm = LLM(model, drafter="dresd", store=store)
        for options, warns in (
            ({}, 0),
            ({"temperature": 0.2}, 0),
            ({"temperature": 0.8}, 1),
            ({"temperature": 0.8}, 0),
        ):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "slipstream"):
                llm.generate([5, 6], max_new_tokens=2, seed=0, **options)
            assert caplog.text.count("was sampled with temperature 0 and top_p 1") == warns


def test_answers_in_files_of_one_name_in_two_folders_are_both_kept(tmp_path, monkeypatch):
    with Store.create(tmp_path / "store", 64) as store:
        for name, tokens in {"one": (5, 6), "two": (7, 8)}.items():
            (tmp_path / name).mkdir()
            monkeypatch.chdir(tmp_path / name)
            _collected(Path("data.jsonl"), {"temperature": 0.0, "top_p": 1.0}, [tokens])
            assert add_answers(store, Path("data.jsonl")).replaced == 0
        assert sorted(d.tolist() for d in store.documents()) == [[5, 6], [7, 8]]


# ---- the command


def test_the_command(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    letters().save_pretrained(tmp_path / "model")
    data = _collected(
        tmp_path / "data.jsonl",
        {"temperature": 0.0, "top_p": 1.0},
        [t.tolist() for t in texts([40, 30])],
    )
    app = typer.Typer()
    app.command()(command)
    words = [tmp_path / "store", "--model", tmp_path / "model", "--device", "cpu", "--answers", data, "--dims", "8"]
    for said in (
        "2 documents read, 0 were known; 66 new vectors of 8",
        "0 documents read, 2 were known; 0 new vectors",
    ):
        done = CliRunner().invoke(app, list(map(str, words)))
        assert done.exit_code == 0, done.exception
        assert said in done.output
    done = CliRunner().invoke(app, list(map(str, words[:5])))  # it knows how many numbers there are
    assert done.exit_code == 0, done.exception
    llm = LLM(model, letters(), "dresd", store=tmp_path / "store")
    assert len(llm.generate([5, 6], max_new_tokens=4).tokens) == 4


def test_without_a_library_there_are_no_graphs(model, tmp_path, monkeypatch):
    monkeypatch.setattr(index, "installed", lambda: False)
    with make(tmp_path, texts([60]), model) as store:
        assert not list((store.folder / "dense").glob("*.graph"))
        assert len(Vectors(store).view().search(np.ones(8, np.float32), 7, 3)) > 0
