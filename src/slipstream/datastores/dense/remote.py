"""Vectors in a database, for stores beyond one machine: Qdrant (`pip install slipstream-llm[database]`), as a cluster
behind an address, or in this process with a folder of its own.

Searches are always within the group of one next token. The database is configured for that, and keeps a graph per
group. The tokens that followed are stored with each vector, so the machine that drafts needs the store's manifest and
transform, but not its text.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.datastores.dense.finding import Asked, Finder
from slipstream.datastores.dense.nearest import Drafts, Nearest, Vectors, View
from slipstream.datastores.dense.transform import Transform
from slipstream.datastores.dense.vector_manifest import Origin
from slipstream.errors import OptionError, StoreError

LENGTH = 32  # tokens stored with each vector
AT_ONCE = 1024  # points per request


def open_client(given: Any) -> Any:
    """An address, a folder, or a client as it is."""
    if not isinstance(given, str):
        return given
    try:
        qdrant = importlib.import_module("qdrant_client")
    except ImportError as error:
        raise OptionError(
            "vectors in a database need the package qdrant-client: pip install 'slipstream-llm[database]'"
        ) from error
    return qdrant.QdrantClient(url=given) if "://" in given else qdrant.QdrantClient(path=given)


def name_of(collection: str) -> str:
    """The name of a store's collection in the database."""
    return "slipstream-" + collection


# ---- filling it


def upload(
    vectors: Vectors, collection: str, database: Any, progress: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Make the database's collection equal to the store's. After an interruption, the same call continues. Returns how
    many documents were added and removed. progress: vectors done, vectors in all."""
    client, models = open_client(database), importlib.import_module("qdrant_client.models")
    name, view = name_of(collection), vectors.view(collection)
    if not client.collection_exists(name):
        _create(client, models, name, vectors)
    expect(client, name, vectors.manifest.origin)
    there = set(_documents(client, models, name))
    here = {int(d) for part, alive in zip(view.parts, view.alive, strict=True) for d in part.digests[alive]}
    for digest in there - here:
        which = models.FieldCondition(key="document", match=models.MatchValue(value=_hex(digest)))
        client.delete(name, models.FilterSelector(filter=models.Filter(must=[which])))
    done, added = 0, 0
    for number in range(len(view.parts)):
        for rows, documents in _by_document(view, number, here - there):
            added += documents
            points = _points(models, view, number, rows)
            # A document counts as uploaded by its first position, so that one comes last.
            first = [p for p in points if p.payload["first"]]
            for some in ([p for p in points if not p.payload["first"]], first):
                if some:
                    client.upsert(name, some, wait=True)
            done += len(rows)
            if progress is not None:
                progress(done, len(view))
    return added, len(there - here)


def expect(client: Any, name: str, origin: Origin) -> None:
    """Raise if the database holds no such collection, or vectors of another model."""
    if not client.collection_exists(name):
        raise StoreError(
            f"the database has no collection {name!r}: `slipstream store embed FOLDER --database …` fills it"
        )
    made = Origin(**client.get_collection(name).config.metadata["origin"])
    if (made.weights, made.dtype, made.layer) != (origin.weights, origin.dtype, origin.layer):
        raise StoreError(
            f"the database's collection {name!r} was made from states of {made}, the store's vectors from {origin}: "
            "delete the collection, or name the database that belongs to this store"
        )


def _create(client: Any, models: Any, name: str, vectors: Vectors) -> None:
    client.create_collection(
        name,
        models.VectorParams(
            size=vectors.transform.dims, distance=models.Distance.DOT, datatype=models.Datatype.FLOAT16
        ),
        # No graph over all vectors, but one for each next token.
        hnsw_config=models.HnswConfigDiff(m=0, payload_m=16),
        metadata={"origin": asdict(vectors.manifest.origin)},
    )
    tenant = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=True)
    for field, schema in (("next", tenant), ("document", models.PayloadSchemaType.KEYWORD)):
        client.create_payload_index(name, field, schema)
    client.create_payload_index(name, "first", models.PayloadSchemaType.BOOL)


def _documents(client: Any, models: Any, name: str) -> Iterator[int]:
    """Digests of documents that were uploaded completely."""
    which = models.FieldCondition(key="first", match=models.MatchValue(value=True))
    offset = None
    while True:
        points, offset = client.scroll(name, models.Filter(must=[which]), limit=AT_ONCE, offset=offset)
        yield from (int(point.payload["document"], 16) for point in points)
        if offset is None:
            return


def _by_document(view: View, number: int, due: set[int]) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Rows of complete documents, a batch at a time, and how many documents these are."""
    part = view.parts[number]
    wanted = np.array([int(d) in due for d in part.digests], np.bool_) & view.alive[number]
    part.check(0, len(part))
    rows = np.flatnonzero(wanted[part.document])
    rows = rows[np.argsort(part.document[rows], kind="stable")]
    ends = np.flatnonzero(np.diff(part.document[rows], append=np.uint32(len(part.digests)))) + 1
    start, documents = 0, 0
    for end in ends.tolist():
        documents += 1
        if end - start >= AT_ONCE or end == len(rows):
            yield rows[start:end], documents
            start, documents = end, 0


def _points(models: Any, view: View, number: int, rows: NDArray[np.int64]) -> list[Any]:
    part = view.parts[number]
    found = Nearest(np.zeros(len(rows), np.float32), np.full(len(rows), number), rows)
    after = view.read(found, LENGTH).tokens
    following = np.searchsorted(part.starts, rows, side="right") - 1
    digests, offsets = part.digests[part.document[rows]], part.offset[rows]
    return [
        models.PointStruct(
            id=_id(int(digest), int(offset)),
            vector=vector,
            payload={"next": str(token), "then": then.tolist(), "document": _hex(digest), "first": offset == 0},
        )
        for digest, offset, vector, token, then in zip(
            digests.tolist(), offsets.tolist(), part.vectors[rows].tolist(), following.tolist(), after, strict=True
        )
    ]


def _id(digest: int, offset: int) -> int:
    """The id of a point: the same for a position at every upload."""
    return (digest + offset * 0x9E3779B97F4A7C15) % (1 << 64)


def _hex(digest: int) -> str:
    return f"{digest:016x}"


# ---- searching


class RemoteFinder(Finder):
    """One request to the database for a whole batch."""

    def __init__(self, database: Any, origin: Origin, transform: Transform, count: int, length: int) -> None:
        super().__init__(transform, count, length)
        if length > LENGTH:
            raise OptionError(
                f"length={length}: the database keeps {LENGTH} tokens with each vector, ask for at most those"
            )
        self.client, self.origin = open_client(database), origin
        self._models = importlib.import_module("qdrant_client.models")
        self._known: set[str] = set()

    def near(self, asked: Sequence[Asked]) -> list[Drafts]:
        results: dict[int, Drafts] = {}
        queries = [self.transform(one.state.cpu()) for one in asked]
        for collection in {one.collection for one in asked}:
            mine = [i for i, one in enumerate(asked) if one.collection == collection]
            requests = [self._request(queries[i].tolist(), asked[i].root) for i in mine]
            for i, found in zip(mine, self._answers(collection, requests), strict=True):
                similarity = np.array([point.score for point in found], np.float32)
                tokens = [np.array(point.payload["then"][: self.length], np.int32) for point in found]
                results[i] = self.with_text(asked[i], Drafts(similarity, tokens), queries[i])
        return [results[i] for i in range(len(asked))]

    def _answers(self, collection: str, requests: list[Any]) -> list[list[Any]]:
        name = name_of(collection)
        if collection not in self._known:
            expect(self.client, name, self.origin)
            self._known.add(collection)
        return [answer.points for answer in self.client.query_batch_points(name, requests)]

    def _request(self, query: list[float], root: int) -> Any:
        m = self._models
        group = m.FieldCondition(key="next", match=m.MatchValue(value=str(root)))
        return m.QueryRequest(query=query, filter=m.Filter(must=[group]), limit=self.count, with_payload=["then"])
