"""store embed: make vectors of a store with the target's hidden states, so that it can be searched by meaning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli import options as o
from slipstream.cli.store import Collection, Folder, cluster, load_encoder
from slipstream.cli.terminal import busy, check_place, counting_bars, err, out, per_second, printable
from slipstream.errors import OptionError

if TYPE_CHECKING:
    from slipstream.datastores.durable.store import Store


def embed(
    folder: Folder,
    model: o.Model = None,
    answers: Annotated[
        list[Path] | None,
        typer.Option(
            "--answers",
            help="First add this file of `slipstream collect` to the store, or make the store of it. Repeatable.",
        ),
    ] = None,
    collection: Collection = "default",
    dims: Annotated[
        int | None, typer.Option(help="Dimensions of a vector, such as 32, 64, 96 or 128. Default: 64.")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens that the model reads at a time: its context.")] = 1024,
    overlap: Annotated[int, typer.Option(help="Tokens that a window shares with the one before it.")] = 256,
    sample: Annotated[int, typer.Option(help="Positions that the dimension reduction is fitted on.")] = 1_000_000,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per forward pass.")] = 4096,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes. Default: one per GPU, or one with all cores.")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="Also upload the vectors to a Qdrant database: an address or a folder.")
    ] = None,
    ray: o.Ray = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    trust_remote_code: o.Trust = False,
) -> None:
    """Make the vectors that `--drafter dresd` searches. If interrupted, run the same command again to go on.

    Use the same model and precision as for generating. Run it again after text was added to the store.
    """
    from slipstream.datastores.dense.build import EmbedSettings
    from slipstream.datastores.dense.build import embed as read
    from slipstream.datastores.dense.reading import reader
    from slipstream.datastores.durable.store import Store

    o.at_least(1, workers=workers)
    if ray is not None and workers is not None:
        raise OptionError("--ray has as many workers as the cluster: leave --workers out")
    gpus = float(ray is not None and (device or "").startswith("cuda"))
    check_place(dtype, device)
    settings = EmbedSettings(dims, window, overlap, sample, batch_tokens)
    if answers:
        _add(folder, answers, collection, model)
    with Store.open(folder) as store:
        model = model or store.manifest.notes.get("model")
        _, _, fingerprint = load_encoder(model)
        store.expect(fingerprint)
        loads = [Load(model, dtype, place, trust_remote_code) for place in _devices(device, workers)]
        with _progress_bar() as progress:
            try:
                if ray is None:
                    done = read(store, loads, settings, progress)
                else:
                    with cluster(ray, partial(reader, Load(model, dtype, device, trust_remote_code)), gpus) as many:
                        done = read(store, (), settings, progress, many)
            except KeyboardInterrupt:
                err.print("stopped: what was read is kept; the same command goes on from here")
                raise
        out.print(
            f"{done.documents:,} documents read, {done.known:,} were known; {done.vectors:,} new vectors of "
            f"{done.dims} numbers, which keep {done.explained:.0%} of the variance"
        )
        if database is not None:
            _upload(store, collection, database)


@dataclass(frozen=True)
class Load:
    """Loads the model. An object that can be sent to other processes."""

    model: str | None
    dtype: str | None
    device: str | None
    trust_remote_code: bool

    def __call__(self) -> Any:
        from slipstream.loading.models import load_model

        with busy("loading the model"):
            return load_model(
                self.model, dtype=self.dtype, device=self.device, trust_remote_code=self.trust_remote_code
            )[0]


def _devices(device: str | None, workers: int | None) -> list[str | None]:
    """The device of each worker."""
    import torch

    gpus = torch.cuda.device_count() if device in (None, "cuda") else 0
    count = workers or max(1, gpus)
    return [f"cuda:{i % gpus}" if gpus else device for i in range(count)]


def _add(folder: Path, answers: list[Path], collection: str, model: str | None) -> None:
    from slipstream.datastores.durable.manifest import NAME
    from slipstream.datastores.durable.store import Store
    from slipstream.datastores.ingest.answers import add_answers

    _, vocabulary, fingerprint = load_encoder(model)
    if (folder / NAME).exists():
        store = Store.open(folder, True, fingerprint)
    else:
        store = Store.create(folder, vocabulary, fingerprint, {"model": model})
    with store:
        for path in answers:
            counts = add_answers(store, path, collection)
            summary = f"{counts.documents:,} answers, {counts.tokens:,} tokens" if counts.documents else "there already"
            out.print(printable(f"{path}: {summary}"), markup=False)


def _upload(store: Store, collection: str, database: str) -> None:
    from slipstream.datastores.dense.nearest import Vectors
    from slipstream.datastores.dense.remote import upload

    with _progress_bar() as progress:
        added, removed = upload(Vectors(store), collection, database, lambda n, of: progress("uploading", n, of))
    out.print(f"{added:,} documents added to {database}, {removed:,} removed", markup=False)


@contextmanager
def _progress_bar() -> Iterator[Any]:
    """A progress function that shows the stage, the rate and the time left."""
    with counting_bars(speed_estimate_period=120) as bars:
        tasks: dict[str, Any] = {}

        def progress(doing: str, done: int, of: int) -> None:
            stage = doing if doing in ("linking", "uploading") else "embedding"  # all other stages share one bar
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            text = f"{doing}: {per_second(bars, tasks[stage], done):,.0f} positions/s"
            bars.update(tasks[stage], description=text, completed=done, total=of)

        yield progress
