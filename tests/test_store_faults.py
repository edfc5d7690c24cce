"""Nothing is lost, and nothing is believed that is not this store's: interrupts, foreign and older files, live damage,
names, forks, full disks, files that nobody wrote."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from patience import PATIENCE
from slipstream.datastores.durable import contents as contents_module
from slipstream.datastores.durable import store as store_module
from slipstream.datastores.durable.manifest import COPY, NAME, read_manifest
from slipstream.datastores.durable.pages import PAGE, checksum, page_sums
from slipstream.datastores.durable.repair import repair
from slipstream.datastores.durable.segment import Segment
from slipstream.datastores.durable.store import Document, Store
from slipstream.datastores.durable.witness import Witness
from slipstream.datastores.ingest.encoding import Encoder
from slipstream.datastores.ingest.ingest import ingest
from slipstream.datastores.ingest.sources import find_sources
from slipstream.datastores.sparse.search import SearchShape
from slipstream.errors import DamagedError, StoreError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


def documents(store, collection="default"):
    return sorted(d.tolist() for d in store.documents(collection))


def children(store, text, collection="default", **options):
    tree = store.draft(np.array(text, np.int32), SearchShape(**options), collection).tree
    return sorted(tree.tokens[tree.children(0)].tolist())


# ---- interrupts


@pytest.mark.slow
@pytest.mark.parametrize("call", ["flush", "compact", "append", "remove"])
def test_an_interrupt_at_any_moment_loses_nothing(folder, monkeypatch, call):
    """At every step that reaches the disk, and the same object goes on."""
    for step in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        with Store.create(folder, 1000) as store:
            monkeypatch.setattr(store_module.Compaction, "in_background", lambda _: None)
            for i in range(4):
                store.append([1, i], "old")
                store.flush()
            store.append([1, 9], "other")
            interrupted = False
            with monkeypatch.context() as patch:
                left = [step]
                for name in ("fsync", "fdatasync", "pwrite", "rename", "unlink"):
                    patch.setattr(os, name, interrupting(getattr(os, name), left))
                try:
                    {"append": lambda: store.append([1, 7]), "remove": lambda: store.remove("other")}.get(
                        call, lambda: getattr(store, call)()
                    )()
                except KeyboardInterrupt:
                    interrupted = True
            store.append([1, 8])
            there = documents(store)
            must = [[1, 0], [1, 1], [1, 2], [1, 3], [1, 8]]
            may = {"append": [[1, 7], [1, 9]], "remove": [[1, 9]]}.get(call, [])
            assert [d for d in there if d not in may] == (must if may else sorted([*must, [1, 9]])), step
            assert children(store, [1], matches=100) == [d[1] for d in there]
        for write in (False, True):
            with Store.open(folder, write) as again:
                assert documents(again) == there, step
                assert again.verify() == []
        if not interrupted:
            break
    assert not interrupted
    assert step >= (2 if call in ("append", "remove") else 8)


def interrupting(real, left):
    def run(*given, **options):
        result = real(*given, **options)
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return result

    return run


# ---- ingest goes on


@dataclass
class Words:
    """A tokenizer of words that are numbers."""

    is_fast: bool = False

    def __call__(self, text, **_):
        return {"input_ids": [int(word) for word in text.split()]}


def ingest_interrupted(store, sources, after):
    """Let so many batches be written."""
    extend, left = store.extend, [after]

    def stopping(*given, **options):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        extend(*given, **options)

    store.extend = stopping
    try:
        ingest(store, sources, Encoder(Words()))
    except KeyboardInterrupt:
        return True
    finally:
        store.extend = extend
    return False


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": " ".join(map(str, text))}) + "\n" for text in texts))


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr("slipstream.datastores.ingest.ingest.BATCH", 300)


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_a_resumed_ingest_has_all_of_long_documents(folder, tmp_path):
    texts = [list(range(i, i + 130)) for i in range(12)]
    write_lines(tmp_path / "x.jsonl", texts)
    sources = find_sources([tmp_path / "x.jsonl"])
    for after in range(1, 20):
        shutil.rmtree(folder, ignore_errors=True)
        with Store.create(folder, 1000, segment_tokens=50) as store:
            interrupted = ingest_interrupted(store, sources, after)
        with Store.open(folder, write=True, segment_tokens=60) as store:  # another length of parts
            ingest(store, sources, Encoder(Words()))
            assert store.info()["tokens"] == 12 * 130, after
            assert ingest(store, sources, Encoder(Words())).known == 1
        if not interrupted:
            break
    assert after > 3


@pytest.mark.slow
def test_an_ingest_of_a_torn_log_has_no_part_twice(folder, tmp_path):
    texts = [list(range(i, i + 130)) for i in range(3)]
    write_lines(tmp_path / "x.jsonl", texts)
    sources = find_sources([tmp_path / "x.jsonl"])
    with Store.create(folder, 1000, segment_tokens=1000) as store:
        store.segment_tokens = 50
        store.flush = lambda: None
        ingest(store, sources, Encoder(Words()))
        log = folder / store.manifest.log
    (folder / Witness.NAME).unlink()
    whole = log.read_bytes()
    for cut in range(PAGE, len(whole), 97):
        copy = shutil.copytree(folder, tmp_path / f"copy{cut}")
        header = bytearray(whole[:PAGE])
        slot = PAGE.to_bytes(8, "little")
        for at in (512, 1024):
            header[at : at + 16] = slot + checksum(slot).to_bytes(8, "little")
        (copy / log.name).write_bytes(bytes(header) + whole[PAGE:cut])
        with Store.open(copy, write=True, segment_tokens=50) as store:
            ingest(store, sources, Encoder(Words()))
            assert store.info()["tokens"] == 3 * 130, cut


@pytest.mark.usefixtures("small_batches")
def test_a_source_that_changed_while_it_was_half_read_is_read_anew(folder, tmp_path):
    path = tmp_path / "x.jsonl"
    write_lines(path, [[i] * 100 for i in range(12)])
    with Store.create(folder, 1000) as store:
        assert ingest_interrupted(store, find_sources([path]), 2)
    write_lines(path, [[500 + i] * 90 for i in range(12)])
    with Store.open(folder, write=True) as store:
        ingest(store, find_sources([path]), Encoder(Words()))
        assert documents(store) == [[500 + i] * 90 for i in range(12)]


# ---- files know whom they belong to


def two_segments(folder, first=0, tokenizer="print"):
    with Store.create(folder, 1000, tokenizer) as store:
        for part in range(2):
            for i in range(20):
                store.append(np.arange(30) + 40 * part + i + first, f"s{i % 2}")
            store.flush()
        store.append([1, 2, 3 + first], "logged")
    return store


def test_a_file_of_another_store_is_refused(folder, tmp_path):
    two_segments(folder)
    whole = documents(Store.open(folder))
    two_segments(tmp_path / "other", first=100)
    for path in sorted((tmp_path / "other").glob("0*")):
        copy = shutil.copytree(folder, tmp_path / "copy")
        shutil.copy(path, copy / path.name)
        for write in (False, True):
            with pytest.raises(DamagedError, match=r"is not the (log|segment) that the manifest names"):
                Store.open(copy, write)
        assert Store.open(folder).verify() == []
        report = repair(copy)
        assert path.name in report.set_aside
        with Store.open(copy) as store:
            assert all(d in whole for d in documents(store))  # nothing of the other store
        shutil.rmtree(copy)


def test_a_segment_of_another_tokenizer_is_refused(folder, tmp_path):
    two_segments(folder)
    two_segments(tmp_path / "other", tokenizer="other")
    shutil.copy(tmp_path / "other" / "00000001.seg", folder / "00000001.seg")
    with pytest.raises(DamagedError, match="is not the segment that the manifest names"):
        Store.open(folder)


def test_an_older_log_is_refused_and_repair_tells_what_is_lost(folder):
    with Store.create(folder, 1000) as store:
        store.append([1, 2], "a")
        log = folder / store.manifest.log
        older = log.read_bytes()
        store.append([1, 3], "b")
    log.write_bytes(older)
    for write in (False, True):
        with pytest.raises(DamagedError, match="is an older log or another one"):
            Store.open(folder, write)
    report = repair(folder)
    assert report.kept == 1
    assert "bytes are lost" in " ".join(report.sentences)
    assert Store.open(folder).verify() == []


def test_an_emptied_log_is_not_repaired_without_a_word(folder):
    with Store.create(folder, 1000) as store:
        store.append([1, 2], "a")
    (folder / store.manifest.log).write_bytes(b"")
    report = repair(folder)
    assert report.kept == 0
    assert "bytes are lost" in " ".join(report.sentences)
    (folder / read_manifest(folder).log).write_bytes(b"")
    (folder / Witness.NAME).unlink()
    assert "can't be told any more" in " ".join(repair(folder).sentences)


@pytest.mark.parametrize("names", [(NAME,), (COPY,), (NAME, COPY), (NAME, COPY, Witness.NAME)])
@pytest.mark.parametrize("merged", [False, True])
def test_the_newest_files_win_over_an_older_manifest(folder, names, merged, monkeypatch):
    monkeypatch.setattr(store_module.Compaction, "in_background", lambda _: None)
    with Store.create(folder, 1000) as store:
        for i in range(3):
            store.append([1, i])
            store.flush()
        older = {name: (folder / name).read_bytes() for name in names}
        store.append([1, 3])
        store.compact() if merged else store.flush()
        store.append([1, 4])
        whole = documents(store)
    for name, data in older.items():
        (folder / name).write_bytes(data)
    if names != (COPY,):
        for write in (False, True):
            with pytest.raises(DamagedError):
                Store.open(folder, write)
        assert len(list(folder.glob("*.seg"))) == (1 if merged else 4)  # a refused writer has deleted nothing
    report = repair(folder)
    assert (report.kept, report.lost) == (5, 0)
    with Store.open(folder, write=True) as again:
        assert documents(again) == whole
        assert again.verify() == []
    assert not (folder / "orphans").exists()


def test_what_is_not_provably_superseded_is_kept(folder, tmp_path):
    two_segments(folder)
    two_segments(tmp_path / "other", first=100)
    foreign = (tmp_path / "other" / "00000001.seg").read_bytes()
    (folder / "00000077.seg").write_bytes(foreign)
    (folder / "00000078.making").write_bytes(b"?")
    Store.open(folder, write=True).close()
    assert (folder / "orphans" / "00000077.seg").read_bytes() == foreign
    assert not (folder / "00000078.making").exists()


def test_a_store_of_format_1_is_read_and_gets_its_ids_from_the_next_writer(tmp_path):
    folder = shutil.copytree(Path(__file__).parent / "data" / "store-format-1", tmp_path / "old")
    expected = [[1, 2, 3], [1, 2, 4], [1, 2, 5], [7, 8, 9]]
    with Store.open(folder) as store:
        assert (documents(store), store.manifest.id) == (expected, "")
        assert documents(store, "other") == [[5, 6]]
        assert store.verify() == []
    with Store.open(folder, write=True) as store:
        assert store.manifest.id
        assert documents(store) == expected
        store.append([1, 2, 6])
        store.compact()
    with Store.open(folder) as store:
        assert documents(store) == sorted([*expected, [1, 2, 6]])
        assert store.verify() == []
        assert "gone" not in store.sources()


# ---- disks


def test_an_append_that_raised_is_not_there_and_one_that_did_not_is(folder, monkeypatch):
    """The segment that an append sets off may fail: the document is in the log."""
    monkeypatch.setattr(store_module, "MEMORY_TOKENS", 10)
    with Store.create(folder, 1000) as store:
        with monkeypatch.context() as patch:
            patch.setattr(contents_module, "write_segment", full)
            with pytest.warns(UserWarning, match="no segment was made"):
                store.append([1, *range(100, 120)])
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                store.append([2, 3])  # it is not tried again at once
        assert len(documents(store)) == 2
    assert len(documents(Store.open(folder))) == 2


def test_no_room_to_acknowledge_is_no_failure(folder, monkeypatch):
    with Store.create(folder, 1000) as store:
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda f, d, at: real(f, d, at) if at >= PAGE else full())
        store.append([1, 2])
        monkeypatch.undo()
        assert documents(store) == [[1, 2]]
        store.append([1, 3])
    assert documents(Store.open(folder)) == [[1, 2], [1, 3]]


def full(*_, **__):
    raise OSError(28, "No space left on device")


def lose_power(folder, store, record):
    """After a record was acknowledged. The slot in the log's header may then be that of a moment before."""
    log = folder / store.manifest.log
    header = log.read_bytes()[:PAGE]
    store.append(record)
    store.close()
    with log.open("r+b") as file:
        file.write(header)
    (folder / Witness.NAME).unlink()


def test_after_a_power_failure_a_reader_sees_what_was_acknowledged(folder):
    store = Store.create(folder, 1000)
    store.append([1, 2])
    lose_power(folder, store, [1, 3])
    assert documents(Store.open(folder)) == [[1, 2], [1, 3]]
    with Store.open(folder, write=True):
        assert documents(Store.open(folder)) == [[1, 2], [1, 3]]


@pytest.mark.parametrize("harmed", ["witness", "manifest", "segment"])
def test_a_repair_keeps_what_was_acknowledged_a_moment_before_a_power_failure(harmed, folder):
    """Whatever else is broken."""
    store = Store.create(folder, 1000)
    store.append([5, 6])
    store.flush()
    store.append([1, 2])
    lose_power(folder, store, [1, 3])
    if harmed == "manifest":
        (folder / NAME).unlink()
    if harmed == "segment":
        (segment,) = folder.glob("*.seg")
        segment.write_bytes(segment.read_bytes()[:-100])
    repair(folder)
    found = documents(Store.open(folder))
    assert [1, 2] in found
    assert [1, 3] in found


@pytest.mark.slow
def test_a_process_that_ends_while_it_reads_a_store_ends_in_order(folder):
    """A thread that searches or merges goes on until Python itself is gone."""
    two_segments(folder)
    done = in_child(
        """
        import sys
        import threading
        import time
        from slipstream.datastores.durable.store import Store

        store = Store.open(sys.argv[1])
        (segment, *_) = store.contents.segments.values()
        tokens = segment.tokens

        def read():
            while True:
                tokens.sum()

        threading.Thread(target=read, daemon=True).start()
        time.sleep(0.1)
        print(int(tokens[0]) >= 0)
        """,
        folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


# ---- live damage, and files that nobody wrote


def in_child(code, *given):
    """A program whose end is what matters."""
    program = textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, given)], capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.slow
def test_a_file_that_is_cut_off_under_a_reader_is_an_error_and_no_crash(folder):
    two_segments(folder)
    done = in_child(
        """
        import os, sys
        from pathlib import Path
        import numpy as np
        from slipstream.datastores.sparse.search import SearchShape
        from slipstream.datastores.durable.store import Store
        from slipstream.errors import DamagedError
        store, text = Store.open(sys.argv[1]), np.array([20, 21], np.int32)
        assert len(store.draft(text, SearchShape()).tree) > 1
        for path in Path(sys.argv[1]).glob("*.seg"):
            os.truncate(path, 4096)
        for call in (lambda: store.draft(text, SearchShape()), lambda: list(store.documents()), store.refresh):
            try:
                call()
            except DamagedError as error:
                print(error)
        """,
        folder,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3, done.stdout
    assert "was cut off while it was being read" in done.stdout


@pytest.mark.parametrize("part", ["tokens", "positions", "keys"])
def test_a_page_that_goes_bad_after_its_first_check_is_noticed(folder, part):
    with Store.create(folder, 1000) as store:
        for i in range(100):
            store.append(np.arange(50) + i % 20)
        store.flush()
        path = folder / store.manifest.segments[0].name
    reader, shape = Store.open(folder), SearchShape(matches=1000)
    before = reader.draft(np.array([20, 21], np.int32), shape).tree.tokens.tolist()
    offset, size = Segment(path).header["sections"][part]
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * size)
    reader.refresh()
    with pytest.raises(DamagedError, match=f"of its {part} is damaged"):
        reader.draft(np.array([20, 21], np.int32), shape)
    assert len(before) > 1


def test_pages_are_not_believed_for_ever(folder, monkeypatch):
    """Where the file system says nothing of a change."""
    two_segments(folder)
    reader = Store.open(folder)
    reader.draft(np.array([20, 21], np.int32), SearchShape())
    segment = next(iter(reader.contents.segments.values()))
    assert segment.checks["tokens"].seen.any()
    reader.refresh()
    assert segment.checks["tokens"].seen.any()
    monkeypatch.setattr(contents_module, "RECHECK", -1.0)
    reader.refresh()
    assert not segment.checks["tokens"].seen.any()


def crafted(path, section, values):
    """Write numbers into a section of a segment, and make every checksum right."""
    data = bytearray(path.read_bytes())
    header = json.loads(data[20 : 20 + int.from_bytes(data[8:12], "little")])
    offset, size = header["sections"][section]
    data[offset : offset + size] = np.resize(values, size // values.itemsize).tobytes()
    for name in ("tokens", "positions", "keys"):
        at, length = header["sections"][name]
        sums = page_sums(np.frombuffer(data, np.uint8, -(-length // PAGE) * PAGE, at)).tobytes()
        there = header["sections"][name + "_sums"][0]
        data[there : there + len(sums)] = sums
    for name in header["checksums"]:
        at, length = header["sections"][name]
        header["checksums"][name] = f"{checksum(bytes(data[at : at + length])):016x}"
    body = json.dumps(header).encode()
    page = (b"SLIPSEG1" + len(body).to_bytes(4, "little") + checksum(body).to_bytes(8, "little") + body).ljust(
        PAGE, b"\0"
    )
    data[:PAGE] = data[-PAGE:] = page
    path.write_bytes(data)


def rewrite(folder, manifest):
    """The manifest with a right checksum, whatever it says."""
    body = {k: v for k, v in manifest.items() if k != "checksum"}
    text = json.dumps({**body, "checksum": f"{checksum(json.dumps(body, sort_keys=True).encode()):016x}"})
    for name in (NAME, COPY):
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"next": 1}, "its next file would be number 1, which is taken"),
        ({"gone": [["../precious", "0" * 16]]}, "it would delete files that can't be this store's"),
        ({"gone": [["00000001.seg", "0" * 16]]}, "it would delete files .* that it needs"),
    ],
)
def test_a_manifest_by_which_files_would_be_lost_is_refused(folder, change, why):
    two_segments(folder)
    precious = folder.parent / "precious"
    precious.write_text("keep me")
    rewrite(folder, json.loads((folder / NAME).read_text()) | change)
    for write in (False, True):
        with pytest.raises(DamagedError, match=why):
            Store.open(folder, write=write)
    assert precious.exists()
    assert (folder / "00000001.seg").exists()
    assert repair(folder).lost == 0


@pytest.mark.slow
@pytest.mark.parametrize("value", [0, 31, 100_000, (1 << 32) - 1])
def test_positions_outside_of_the_text_are_an_error_and_no_crash(folder, value):
    two_segments(folder)
    manifest = json.loads((folder / NAME).read_text())
    crafted(folder / "00000001.seg", "positions", np.array([value], "<u4"))
    for entry in manifest["segments"]:
        entry["sum"] = Segment(folder / entry["name"]).sum
    rewrite(folder, manifest)
    done = in_child(
        """
        import sys
        import numpy as np
        from slipstream.datastores.sparse.search import SearchShape
        from slipstream.datastores.durable.store import Store
        from slipstream.errors import DamagedError
        store = Store.open(sys.argv[1])
        try:
            store.draft(np.array([20, 21], np.int32), SearchShape())
        except DamagedError as error:
            print(error)
        print(store.verify())
        """,
        folder,
    )
    assert done.returncode == 0, done.stderr
    assert "of its positions is damaged" in done.stdout
    assert "positions are not in order" in done.stdout


# ---- names and numbers


def test_names_that_json_would_merge_are_refused(folder):
    apart, together = "\ud83d\ude00", "\U0001f600"
    with Store.create(folder, 1000) as store:
        store.append([1, 2], "", together)
        with pytest.raises(StoreError, match="its surrogates make up a character"):
            store.append([1, 3], "", apart)
        with pytest.raises(StoreError, match="its surrogates make up a character"):
            store.append([1, 3], apart)
        store.flush()
        assert children(store, [1], together) == [2]
        assert children(store, [1], apart) == []


def test_ids_that_no_store_holds_match_nothing(folder):
    with Store.create(folder, 60_000) as store:
        store.append([5, 6, 7])
        store.append([9, 6, 8])
        store.append([6, 10])  # a separator stands before it
        for _ in range(2):
            assert children(store, [65_535, 6], shortest=2) == []
            assert children(store, [5 + (1 << 16), 6], shortest=2) == []
            assert children(store, [-1, 6], shortest=2) == []
            assert children(store, [65_535]) == children(store, [70_000]) == children(store, [-5]) == []
            assert children(store, [70_000, 5, 6], shortest=2) == [7]
            store.flush()


def test_a_vocabulary_has_to_fit(folder):
    for vocabulary in (0, -1, 1 << 32, 1 << 40):
        with pytest.raises(StoreError, match=f"vocabulary is {vocabulary}: there are 1 to 4294967295 ids"):
            Store.create(folder, vocabulary)
    assert not folder.exists()
    Store.create(folder, (1 << 32) - 1).close()


def test_removed_matches_do_not_hide_a_living_one(folder):
    with Store.create(folder, 1000) as store:
        store.extend([Document([1, 2, 3], "gone")] * 10_000)
        store.append([1, 2, 4], "kept")
        store.flush()
        store.remove("gone")
        assert children(store, [1, 2]) == [4]


# ---- processes


def test_a_fork_of_a_writer_can_read_and_not_write(folder):
    with Store.create(folder, 1000) as store:
        store.append([1, 2])
        child = os.fork()
        if child == 0:
            try:
                store.append([1, 3])
                os._exit(1)
            except StoreError as error:
                fine = "of which this is a fork" in str(error) and documents(store) == [[1, 2]]
                store.close()
                os._exit(0 if fine else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(StoreError, match="being written"):
            Store.open(folder, write=True)
        store.append([1, 4])
    assert documents(Store.open(folder)) == [[1, 2], [1, 4]]


def test_a_fork_does_not_keep_a_store_that_its_parent_closed(folder):
    store = Store.create(folder, 1000)
    waits, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(waits, 1)
        os._exit(0)
    try:
        store.close()
        Store.open(folder, write=True).close()
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        os.close(waits)


def test_a_deleted_lock_lets_no_second_writer_in(folder):
    with Store.create(folder, 1000):
        (folder / "lock").unlink()
        with pytest.raises(StoreError, match="there can be one writer"):
            Store.open(folder, write=True)
    Store.open(folder, write=True).close()


def test_a_segment_takes_no_descriptor(folder, monkeypatch):
    monkeypatch.setattr(store_module.Compaction, "in_background", lambda _: None)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Store.create(folder, 1000) as store:
        for i in range(60):
            store.append([1, i], "", f"c{i}")
        store.flush()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, before[1]))
        try:
            with Store.open(folder) as reader:
                assert len(reader.collections) == 60
                assert children(reader, [1], "c59") == [59]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("name", [NAME, COPY, "log", "00000001.seg"])
def test_a_folder_where_a_file_should_be_is_said(folder, name):
    two_segments(folder)
    path = folder / (name if name != "log" else read_manifest(folder).log)
    path.unlink()
    path.mkdir()
    for write in (False, True):
        try:
            Store.open(folder, write).close()
        except StoreError:
            continue
        assert name == COPY
        assert not write
    if name == COPY:
        assert any(COPY in sentence for sentence in Store.open(folder).verify())


@pytest.mark.slow
def test_many_small_documents_are_cheap_to_open(folder):
    """Not by the clock: a document must be no object of its own."""
    with Store.create(folder, 1000) as store:
        store.extend([Document([i % 1000]) for i in range(20_000)])
        assert sum(len(memory.batches) for memory in store.contents.memory.values()) == 1
    with Store.open(folder) as reader:
        (memory,) = reader.contents.memory.values()
        assert len(memory.batches) == 1
        assert reader.info()["documents"] == 20_000


@pytest.mark.slow
def test_signals_are_left_as_they_were_for_others():
    """A bus error that is not ours ends the process as it would have."""
    done = in_child(
        """
        import mmap, os, sys, tempfile
        from pathlib import Path
        from slipstream.datastores.durable.store import Store
        folder = tempfile.mkdtemp()
        with Store.create(folder + "/s", 100) as store:
            store.append([1, 2, 3])
            store.flush()
        file = open(folder + "/f", "w+b")
        file.truncate(8192)
        mapped = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        mapped[5000]
        """
    )
    assert done.returncode == -signal.SIGBUS
