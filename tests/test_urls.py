"""Sources behind URLs are read as files are."""

import io
import json
import pickle
import sys

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from slipstream.datastores.durable.store import Store
from slipstream.datastores.ingest.encoding import Encoder
from slipstream.datastores.ingest.ingest import ingest
from slipstream.datastores.ingest.records import read_documents
from slipstream.datastores.ingest.sources import find_sources
from slipstream.errors import OptionError, StoreError
from slipstream.urls import Url
from test_sharded import Letters


@pytest.fixture
def bucket():
    """Some files in a bucket."""
    there = fsspec.filesystem("memory")
    there.pipe(
        {
            "/bucket/a.txt": "Über Bäume\n".encode(),
            "/bucket/deep/b.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
            "/bucket/deep/c.json": json.dumps([{"text": "three"}]).encode(),
            "/bucket/deep/.hidden": b"secret",
            "/.own/.kept/e.txt": b"six",
            "/.own/.kept/__pycache__/f.txt": b"seven",
            "/bucket/image.bin": b"\0\1\2",
            "/bucket/d.parquet": parquet({"text": ["four", "five"]}),
        }
    )
    yield there
    for folder in ("/bucket", "/.own"):
        there.rm(folder, recursive=True)


def parquet(columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def read(*given):
    return [document for source in find_sources(given) for document in read_documents(source)]


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("memory://bucket/a.txt", ["Über Bäume\n"]),
        ("memory://bucket/deep", ["one", "two", "three"]),
        ("memory://bucket/deep/*.jsonl", ["one", "two"]),
        ("memory://bucket/d.parquet", ["four", "five"]),
        ("memory://bucket/deep/*", ["one", "two", "three"]),
        ("memory://bucket/deep/.hidden", ["secret"]),
        ("memory://.own/.kept", ["six"]),
        ("memory://.own/.kept/*.txt", ["six"]),
        ("memory://.own/.kept/**", ["six"]),
        ("memory://bucket", ["Über Bäume\n", "four", "five", "one", "two", "three"]),
    ],
)
def test_a_url_names_a_file_a_folder_or_a_pattern(given, found):
    assert read(given) == found


@pytest.mark.usefixtures("bucket")
def test_each_file_is_read_once():
    assert read("memory://bucket/deep", "memory://bucket/deep/b.jsonl") == ["one", "two", "three"]


def test_a_file_url_reads_what_its_path_reads(tmp_path):
    (tmp_path / "x.txt").write_text("text\r\n")
    assert read(f"file://{tmp_path}/x.txt") == read(tmp_path / "x.txt")


def test_a_source_that_changed_is_replaced(bucket, tmp_path):
    def fill(store):
        return ingest(store, find_sources(["memory://bucket/a.txt"]), Encoder(Letters()))

    with Store.create(tmp_path / "store", 256) as store:
        assert fill(store).documents == 1
        assert fill(store).known == 1
        bucket.pipe("/bucket/a.txt", b"something else")
        assert fill(store).replaced == 1
        assert [len(d) for d in store.documents()] == [14]


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ("memory://bucket/nothing", StoreError, "names no files"),
        ("memory://bucket/image.bin", StoreError, "is binary: give UTF-8 text"),
        ("nowhere://x", StoreError, "nowhere://x can't be opened: .*nowhere"),
        ("s3://bucket/x", OptionError, "needs a package that is missing: .*s3fs"),
    ],
)
def test_what_is_refused(given, kind, says):
    with pytest.raises(kind, match=says):
        find_sources([given])


def test_without_fsspec_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(OptionError, match=r"needs fsspec, which is missing: `pip install slipstream-llm\[remote\]`"):
        Url("memory://x")


@pytest.mark.usefixtures("bucket")
def test_only_the_name_travels():
    url = Url("memory://bucket/a.txt")
    assert pickle.loads(pickle.dumps(url)) == url
    assert len(pickle.dumps(url)) < 150
