"""The files of a checkpoint: find them, read them without running code, write them atomically."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import DrafterError
from slipstream.loading import hub

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_NAMES = (
    WEIGHTS,
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
)
_ENDINGS = (".safetensors", ".pt", ".bin")
_NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt")  # files of a trainer
_WITHIN = "medusa_head."  # prefix of heads' tensors in a file with a whole model


def find_folder(source: str | Path) -> Path:
    """The folder itself, or the local copy of a model hub's repository with this name."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise DrafterError(f"{path} is a file: name the folder with the head's {CONFIG} and weights")
    name = str(source)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise DrafterError(f"there is no folder {name!r}, and it isn't a name on the model hub either (owner/name)")
    try:
        wanted = ["*.json", *(f"*{ending}" for ending in _ENDINGS)]
        with hub.asked_once():
            return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DrafterError(f"there is no folder {name!r}, and the model hub gave no such head: {reason}") from error


def read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise DrafterError(f"{folder} holds no {CONFIG} (it holds {found}): name the folder of a trained head")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise DrafterError(f"{file} can't be read: {error}") from error
    return config


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's weights, which may be in several files. If they are a whole model with heads, only
    the heads'."""
    file = _weights(folder)
    if file.suffix != ".json":
        return _read(file)
    try:
        places = dict(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
        shards = sorted({places[name] for name in _heads_of(places)})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DrafterError(f"{file} is no index of weights: {error}") from error
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if Path(shard).name != shard:
            raise DrafterError(f"{file} points outside its folder, to {shard!r}: don't use this checkpoint")
        tensors |= _read(folder / shard)
    return tensors


def _weights(folder: Path) -> Path:
    for name in _NAMES:
        if (folder / name).is_file():
            return folder / name
    found = sorted(p for p in folder.iterdir() if p.suffix in _ENDINGS and p.name not in _NO_WEIGHTS)
    if len(found) != 1:
        names = f"several ({', '.join(p.name for p in found)})" if found else "none"
        raise DrafterError(
            f"{folder} must hold one file of weights, as {WEIGHTS} or {_NAMES[2]}, but there are {names}"
        )
    return found[0]


def _read(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise DrafterError(f"{file.parent} lacks {file.name}, which its index names: fetch the checkpoint again")
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as inside:
                return {name: inside.get_tensor(name) for name in _heads_of(inside.keys())}
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DrafterError(
            f"{file} holds more than tensors, and loading it could run code: it was not loaded. "
            "Ask its author for a safetensors file, or for plain tensors"
        ) from error
    except Exception as error:
        raise DrafterError(f"{file} can't be read as weights: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise DrafterError(f"{file} must hold tensors by name, but holds something else: is it a head's file?")
    return {name: tensors[name] for name in _heads_of(tensors)}


def _heads_of(names: Iterable[str]) -> list[str]:
    """All names; of a whole model with heads, only the heads'."""
    every = list(names)
    return [name for name in every if name.startswith(_WITHIN)] or every


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str = WEIGHTS) -> None:
    """Write both files under temporary names, then rename them when both are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}

    def weights(path: Path) -> None:
        if name.endswith(".safetensors"):
            save_file(plain, path, metadata={"format": "pt"})
        else:
            torch.save(plain, path)

    def text(path: Path) -> None:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    made = [_make(folder / name, weights), _make(folder / CONFIG, text)]
    for path, final in made:
        path.replace(final)


def _make(final: Path, put: Callable[[Path], None]) -> tuple[Path, Path]:
    path = final.with_name(final.name + ".making")
    put(path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path, final
