"""store: build, extend, search, check and repair a datastore."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from slipstream.cli import options as o
from slipstream.cli.terminal import busy, counting_bars, ensure_embedded, err, out, per_second, printable
from slipstream.errors import DamagedError, OptionError, StoreError

if TYPE_CHECKING:
    from slipstream.datastores.durable.store import Store
    from slipstream.workers import Workers

app = typer.Typer(help="Build, search and maintain datastores: text on disk to draft from.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The store's folder.")]
Sources = Annotated[
    list[str] | None, typer.Argument(help="Files, folders, globs or URLs of text, code, JSON lines or parquet.")
]
Tokenizer = Annotated[
    str | None,
    typer.Option("--model", "--tokenizer", "-m", help="The model whose tokenizer is used. Default: the embedded one."),
]
Collection = Annotated[
    str, typer.Option("--collection", "-c", help="The collection. Texts of different collections never mix.")
]
Field = Annotated[str | None, typer.Option(help="The field of JSON or parquet records that holds the text.")]
Stdlib = Annotated[bool, typer.Option("--stdlib", help="Add the source of Python's standard library.")]
Dedup = Annotated[bool, typer.Option("--dedup", help="Skip documents that are already in the collection.")]


@app.command()
def build(
    out_folder: Annotated[Path, typer.Option("--out", "-o", help="The folder of the new store.")],
    sources: Sources = None,
    stdlib: Stdlib = False,
    model: Tokenizer = None,
    field: Field = None,
    dedup: Dedup = False,
    collection: Collection = "default",
    segment_tokens: Annotated[
        int, typer.Option(help="Most tokens per segment. Building takes 5 bytes of memory for each.")
    ] = 1 << 27,
    ray: o.Ray = None,
) -> None:
    """Build a store. If interrupted, run the same command again to go on."""
    from slipstream.datastores.durable.manifest import NAME
    from slipstream.datastores.durable.store import Store
    from slipstream.datastores.ingest.sources import find_sources

    found = find_sources(sources or [], stdlib)
    encoder, vocabulary, fingerprint = load_encoder(model)
    if (out_folder / NAME).exists():
        store = Store.open(out_folder, True, fingerprint, segment_tokens)
        if not store.manifest.notes.get("building"):
            store.close()
            raise OptionError(
                f"{out_folder} already holds a datastore: `slipstream store add {out_folder} …` adds to it"
            )
    else:
        notes = {"building": True, "model": model}
        store = Store.create(out_folder, vocabulary, fingerprint, notes, segment_tokens)
    with store:
        fill(store, found, encoder, collection, field, dedup, ray)
        store.note(building=False)


@app.command()
def add(
    folder: Folder,
    sources: Sources = None,
    stdlib: Stdlib = False,
    model: Tokenizer = None,
    field: Field = None,
    dedup: Dedup = False,
    collection: Collection = "default",
) -> None:
    """Add sources to a store. A source that has changed since it was added is replaced."""
    from slipstream.datastores.durable.store import Store
    from slipstream.datastores.ingest.sources import find_sources

    found = find_sources(sources or [], stdlib)
    with Store.open(folder, write=True) as store:
        encoder, _, fingerprint = load_encoder(model or store.manifest.notes.get("model"))
        store.expect(fingerprint)
        fill(store, found, encoder, collection, field, dedup)


@app.command()
def info(
    folder: Folder,
    sources: Annotated[bool, typer.Option("--sources", help="List the sources of the documents.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line.")] = False,
) -> None:
    """Show what a store holds."""
    import json

    from slipstream.datastores.durable.store import Store

    with Store.open(folder) as store:
        summary = store.info()
        if sources:
            summary["sources"] = {
                c: {s.name: s.documents for s in store.sources(c).values()} for c in store.collections
            }
    if as_json:
        print(printable(json.dumps(summary, ensure_ascii=False)))
        return
    print_nested(summary)


def print_nested(values: dict[str, Any], indent: str = "") -> None:
    for name, value in values.items():
        label = f"{indent}{escape(printable(name) or '(no name)')}:"
        if isinstance(value, dict):
            out.print(label)
            print_nested(value, indent + "  ")
        else:
            number = isinstance(value, int) and not isinstance(value, bool)
            out.print(f"{label} {value:,}" if number else f"{label} {escape(printable(str(value)))}")


@app.command()
def search(
    folder: Folder,
    text: Annotated[str, typer.Argument(help="The end of a text, to be found in the store.")],
    model: Tokenizer = None,
    collection: Collection = "default",
    nodes: Annotated[int, typer.Option(help="Most nodes of the tree that is shown.")] = 24,
    length: Annotated[int, typer.Option(help="Most tokens of a continuation.")] = 10,
) -> None:
    """Find matches of the end of a text, and show what followed them as a tree."""
    import numpy as np
    from rich.tree import Tree

    from slipstream.datastores.durable.store import Store
    from slipstream.datastores.sparse.search import SearchShape

    with Store.open(folder) as store:
        encoder = store_encoder(store, model or store.manifest.notes.get("model"))
        tokens = encoder.encode([text])[0]
        if not len(tokens):
            raise OptionError("the text is empty: give at least a word")
        shape = SearchShape(nodes=nodes, length=length, matches=1024, exact=True)
        found = store.draft(tokens.astype(np.int32), shape, collection)

    def words(ids: Any) -> str:
        return escape(repr(encoder.tokenizer.decode(ids))[1:-1])

    for n, count in zip(found.lengths, found.counts, strict=True):
        out.print(f"{count:>9,} × {n} tokens  [dim]{words(tokens[-n:])}[/dim]")
    if not len(found.lengths):
        out.print("the end of this text is not in the store")
        return
    tree = found.tree
    shown = [Tree(f"[bold]{words(tree.tokens[:1])}[/bold]")]
    for i in range(1, len(tree)):
        label = f"{words(tree.tokens[i : i + 1])}  [dim]{tree.score[i]:.0%}[/dim]"
        shown.append(shown[tree.parents[i]].add(label))
    out.print(shown[0])


@app.command()
def remove(
    folder: Folder,
    source: Annotated[str, typer.Argument(help="The path of a file, or a name that `store info --sources` shows.")],
    collection: Collection = "default",
) -> None:
    """Remove every document of a source. `store info --sources` lists the sources."""
    from slipstream.datastores.durable.store import Store

    with Store.open(folder, write=True) as store:
        count = store.remove(source, collection) or store.remove(os.path.abspath(source), collection)
    if not count:
        raise OptionError(f"{folder} has no source {source!r} in {collection!r}: see `slipstream store info --sources`")
    out.print(f"removed {count} documents; `slipstream store compact` gives their space back")


@app.command()
def compact(folder: Folder) -> None:
    """Merge segments, and free the space of removed documents."""
    from slipstream.datastores.durable.store import Store

    with Store.open(folder, write=True) as store, busy("compacting"):
        before = store.info()["bytes"]
        store.compact()
        out.print(f"{before / 1e6:.1f} MB before, {store.info()['bytes'] / 1e6:.1f} MB now")


@app.command()
def follow(
    source: Annotated[str, typer.Argument(help="The store to follow: a folder or a URL.")],
    target: Annotated[str, typer.Argument(help="The copy: a folder, or a URL for others to follow.")],
    every: Annotated[
        float | None, typer.Option(help="Keep running, and check for changes every so many seconds.")
    ] = None,
) -> None:
    """Make one store a copy of another: fetch its new segments, check them, then switch to them all at once."""
    from time import sleep

    from slipstream.datastores.durable.follow import follow as fetch

    if every is not None and not every > 0:
        raise OptionError(f"--every {every} is out of range: it must be above 0")
    while True:
        try:
            done = fetch(source, target)
        except (OSError, StoreError) as error:
            if every is None or isinstance(error, DamagedError):
                raise
            err.print(f"[yellow]{escape(str(error))}[/yellow]; trying again")
        else:
            if done.changed or every is None:
                out.print(f"generation {done.generation}: {done.fetched} segments, {done.bytes / 1e6:.1f} MB fetched")
        if every is None:
            return
        sleep(every)


@app.command()
def verify(folder: Folder) -> None:
    """Check a whole store: every checksum, and the order of every segment."""
    from slipstream.datastores.durable.store import Store

    with Store.open(folder) as store, busy("checking the store"):
        problems = store.verify()
        summary = store.info()
    for problem in problems:
        err.print(f"[red]{escape(problem)}[/red]")
    if problems:
        raise typer.Exit(1)
    out.print(f"sound: {summary['documents']:,} documents, {summary['tokens']:,} tokens")


@app.command()
def repair(folder: Folder) -> None:
    """Repair a damaged store: keep every document that is intact, and move damaged files to FOLDER/damaged."""
    from slipstream.datastores.durable.repair import repair as repair_store

    report = repair_store(folder)
    for sentence in report.sentences:
        out.print(escape(printable(sentence)))


def load_encoder(model: str | None) -> tuple[Any, int, str]:
    """The encoder for a model's tokenizer, the size of its vocabulary, and its fingerprint."""
    if model is None:
        ensure_embedded()
    with busy("loading the tokenizer"):
        from slipstream.datastores.ingest.encoding import Encoder, tokenizer_fingerprint
        from slipstream.loading.models import load_tokenizer

        tokenizer, vocabulary = load_tokenizer(model)
        return Encoder(tokenizer), vocabulary, tokenizer_fingerprint(tokenizer)


def store_encoder(store: Store, model: str | None) -> Any:
    """The encoder that a store was made with. It is made from the tokenizer's file alone if that gives the same ids,
    since importing transformers takes seconds."""
    from slipstream.datastores.ingest.encoding import Encoder, FileTokenizer, tokenizer_fingerprint
    from slipstream.loading import embedded

    file = (Path(model) if model else embedded.folder()) / "tokenizer.json"
    if file.is_file():
        tokenizer = FileTokenizer(file)
        if tokenizer_fingerprint(tokenizer) == store.manifest.tokenizer:
            return Encoder(tokenizer)
    encoder, _, fingerprint = load_encoder(model)
    store.expect(fingerprint)
    return encoder


def fill(
    store: Store, found: Any, encoder: Any, collection: str, field: str | None, dedup: bool, ray: str | None = None
) -> None:
    """Read sources into a store, with a bar that shows the rate and the time left."""
    from slipstream.datastores.ingest.ingest import ingest
    from slipstream.datastores.ingest.sharded import ingest_sharded

    options: dict[str, Any] = {"collection": collection, "field": field, "deduplicate": dedup}
    with counting_bars(counts=False) as bars:
        task = bars.add_task("reading", total=None)

        def progress(done: int, of: int, tokens: int) -> None:
            text = f"{tokens / 1e6:.1f}M tokens, {per_second(bars, task, tokens) / 1e6:.2f}M/s"
            bars.update(task, description=text, completed=done, total=of)

        try:
            if ray is None:
                counts = ingest(store, found, encoder, progress=progress, **options)
            else:
                with cluster(ray, partial(returned, encoder)) as workers:
                    counts = ingest_sharded(store, found, workers, progress=progress, **options)
        except KeyboardInterrupt:
            err.print("stopped: what was read is in the store; the same command goes on from here")
            raise
    summary = f"{counts.sources} sources, {counts.documents:,} documents, {counts.tokens:,} tokens"
    for count, what in (
        (counts.duplicates, "duplicates left out"),
        (counts.known, "sources were there already"),
        (counts.replaced, "had changed and were replaced"),
    ):
        summary += f"; {count} {what}" if count else ""
    out.print(summary)


@contextmanager
def cluster(address: str, load: Callable[[], Any], gpus: float = 0) -> Iterator[Workers]:
    """Ray's workers, until the block ends."""
    from slipstream.cluster import RayWorkers

    with busy("connecting to the cluster"):
        workers = RayWorkers(address, load, gpus)
    try:
        yield workers
    finally:
        workers.close()


def returned(value: Any) -> Any:
    """The value itself. A worker's load function, for workers that are sent what they need."""
    return value
