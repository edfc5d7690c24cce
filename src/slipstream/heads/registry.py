"""The registry of heads: a head is found by its model's weights, whatever the model's name.

`slipstream heads add FOLDER` adds an entry to a file in the cache folder. `auto` uses the heads that are registered for
its model, and those that come with slipstream.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import DrafterError
from slipstream.heads.base import Lender
from slipstream.heads.checkpoint import CONFIG, read_config
from slipstream.kept import cache_folder
from slipstream.user_files import write_text

SHIPPED = Path(__file__).parent / "shipped"  # <kind>/: heads for the embedded model
SAMPLE = 16  # numbers hashed of each tensor: training changes nearly all of them, so a few are enough


@dataclass(frozen=True)
class Registered:
    """A head's folder, its kind, and the model it drafts for."""

    folder: str
    kind: str
    model: str  # its name when the head was added, for display
    fingerprint: str


@torch.inference_mode()
def fingerprint(model: Any) -> str:
    """A hash of a model's shape and weights. In bfloat16, so that it does not depend on the dtype it was loaded in."""
    config = model.config.get_text_config()
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    shape = {name: getattr(config, name, None) for name in names}
    found = hashlib.sha256(json.dumps(shape).encode())
    weights = [(name, p) for name, p in sorted(model.named_parameters()) if p.device.type != "meta"]
    sampled: dict[str, torch.Tensor] = {}
    for device in {p.device for _, p in weights}:  # one transfer from each
        here = [(name, p) for name, p in weights if p.device == device]
        slices = [p.reshape(-1)[:: max(1, p.numel() // SAMPLE)][:SAMPLE].to(torch.bfloat16) for _, p in here]
        parts = torch.cat(slices).cpu().split([len(each) for each in slices])
        sampled |= zip((name for name, _ in here), parts, strict=True)
    found.update(" ".join(f"{name} {tuple(p.shape)}" for name, p in weights).encode())
    found.update(torch.cat([sampled[name] for name, _ in weights]).view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:32]


def entries() -> list[Registered]:
    """All registered heads."""
    file = _file()
    try:
        return [Registered(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise DrafterError(f"{file} can't be read: {error}. Delete it and add your heads again") from error


def entries_for(model: Any) -> list[Registered]:
    """The heads registered for this model."""
    known = entries()
    mine = fingerprint(model) if known else ""
    return [entry for entry in known if entry.fingerprint == mine]


def add(folder: str | Path, model: Any) -> Registered:
    """Register a head, after a check that it fits the model."""
    from slipstream.heads import load_head

    place = Path(folder).resolve()
    kind = load_head(place, model).kind
    entry = Registered(str(place), kind, Lender.of(model).name, fingerprint(model))
    _write([*(e for e in entries() if e.folder != entry.folder), entry])
    return entry


def remove(folder: str | Path) -> None:
    """Remove a head from the registry; its files stay."""
    place = str(Path(folder).resolve())
    known = entries()
    if all(entry.folder != place for entry in known):
        raise DrafterError(f"{place} is not registered: slipstream heads list tells which are")
    _write([entry for entry in known if entry.folder != place])


def heads_for(model: Any) -> list[tuple[str, Path]]:
    """Kind and folder of each head for this model: the registered ones, then those that come with slipstream."""
    registered = [(entry.kind, Path(entry.folder)) for entry in entries_for(model)]
    name = Lender.of(model).name
    return [*(head for head in registered if head[1].is_dir()), *(h for h in shipped() if made_for(h[1]) == name)]


def shipped() -> list[tuple[str, Path]]:
    """Kind and folder of each head that comes with slipstream."""
    return [(path.parent.name, path.parent) for path in sorted(SHIPPED.glob(f"*/{CONFIG}"))]


def made_for(folder: Path) -> str | None:
    """The name of the model that a head was trained for, if its files have it."""
    return read_config(folder).get("slipstream", {}).get("target")


def _file() -> Path:
    return cache_folder() / "heads.json"


def _write(known: list[Registered]) -> None:
    _file().parent.mkdir(parents=True, exist_ok=True)
    write_text(_file(), json.dumps([asdict(entry) for entry in known], indent=1))
