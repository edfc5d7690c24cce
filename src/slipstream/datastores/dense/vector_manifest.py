"""The manifest of a store's vectors: the model that they came from, and the valid parts. It is replaced atomically."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.datastores.durable.disk import write_whole
from slipstream.datastores.durable.manifest import fits
from slipstream.datastores.durable.pages import checksum
from slipstream.errors import DamagedError, DrafterError, StoreError

FOLDER, NAME = "dense", "dense.json"
FORMAT = 2
READABLE = (1, 2)  # format 1 has no ids


@dataclass(frozen=True)
class Origin:
    """The model whose states the vectors were made from."""

    model: str  # its name, for messages only: the weights identify it
    weights: str  # a digest of some numbers of every weight
    dtype: str
    layer: int  # numbered as in `Want.layers`: the last, which the output matrix reads
    hidden: int  # numbers of a state

    @classmethod
    def of(cls, model: Any) -> Origin:
        text = model.config.get_text_config()
        some = [_some(p) for _, p in sorted(model.named_parameters())]
        return cls(
            model=getattr(model.config, "_name_or_path", "") or type(model).__name__,
            weights=f"{checksum(torch.cat(some).cpu().numpy()):016x}",
            dtype=str(model.dtype).removeprefix("torch."),
            layer=int(text.num_hidden_layers),
            hidden=int(model.get_output_embeddings().weight.shape[1]),
        )

    def __str__(self) -> str:
        return f"{self.model} ({self.dtype}, layer {self.layer}, weights {self.weights})"


def _some(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // 16)][:16].float()


@dataclass(frozen=True)
class PartEntry:
    """A part of the vectors."""

    name: str
    collection: str
    documents: int
    vectors: int
    bytes: int
    sum: str = ""  # checksum of its header, which has the checksums of everything else; empty in format 1


@dataclass(frozen=True)
class VectorManifest:
    origin: Origin
    vocabulary: int  # of the store
    dims: int
    window: int  # tokens that the model read at a time
    overlap: int  # tokens of the previous window that a window repeats
    parts: tuple[PartEntry, ...] = ()
    next: int = 1  # number of the next part
    store: str = ""  # the id of the store whose text these are vectors of
    transform: str = ""  # checksum of the header of the transform that made them; empty: there is none yet

    def expect(self, folder: Path, origin: Origin) -> None:
        """Raise if the vectors came from another model than this one."""
        ours, theirs = self.origin, origin
        if (ours.weights, ours.dtype, ours.layer) != (theirs.weights, theirs.dtype, theirs.layer):
            raise DrafterError(
                f"the vectors in {folder} were made from states of {ours}, and this is {theirs}: load that model in "
                f"that precision, or delete {folder} and run `slipstream store embed` with this one"
            )

    def belongs(self, folder: Path, store: str) -> None:
        """Raise if these are vectors of another store's text."""
        if self.store and store and self.store != store:
            raise StoreError(
                f"{folder} was made for another store: delete it, and run `slipstream store embed {folder.parent}`"
            )


def write_manifest(folder: Path, manifest: VectorManifest) -> None:
    body = {"format": FORMAT, **asdict(manifest)}
    write_whole(folder / NAME, json.dumps({**body, "checksum": _sum(body)}, indent=1).encode())


def manifest_bytes(folder: Path) -> bytes:
    try:
        return (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(
            f"{folder.parent} has no vectors: `slipstream store embed {folder.parent} --model …` makes them"
        ) from error


def read_manifest(folder: Path, data: bytes | None = None) -> VectorManifest:
    """data: the file's bytes, if they were read already."""
    try:
        body = json.loads(manifest_bytes(folder) if data is None else data)
        stored = body.pop("checksum")
        if stored != _sum(body):
            raise ValueError("its checksum is wrong")
        found = body.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{folder / NAME} is damaged ({error}): delete {folder}, and `slipstream store embed` makes it anew"
        ) from error
    if found not in READABLE:
        raise StoreError(f"{folder / NAME} has format {found}, this version reads {FORMAT}: update slipstream")
    try:
        parts = tuple(PartEntry(**entry) for entry in body.pop("parts"))
        manifest = VectorManifest(Origin(**body.pop("origin")), parts=parts, **body)
        fits(manifest, _SHAPE)
        fits(manifest.origin, {n: str if n in ("model", "weights", "dtype") else int for n in _ORIGIN})
        names = [p.name for p in parts]
        if not all(map(PART.fullmatch, names)) or len(set(names)) < len(names) or min(manifest.dims, manifest.next) < 1:
            raise ValueError("it names files that can't be its own")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(
            f"{folder / NAME} is damaged ({error}): delete {folder}, and `slipstream store embed` makes it anew"
        ) from error
    return manifest


PART = re.compile(r"\d{8,20}\.part")
_ORIGIN = ("model", "weights", "dtype", "layer", "hidden")
_SHAPE: dict[str, Any] = {
    "vocabulary": int, "dims": int, "window": int, "overlap": int, "next": int, "store": str, "transform": str,
    "parts": {"name": str, "collection": str, "documents": int, "vectors": int, "bytes": int, "sum": str},
}  # fmt: skip


def _sum(body: dict[str, Any]) -> str:
    return f"{checksum(json.dumps(body, sort_keys=True).encode()):016x}"
