"""GGUF files as ordinary checkpoints in the user's cache folder: each is converted once, when it is first loaded.

Weights keep their float32 values exactly; those that half precision represents exactly are stored in half precision.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from slipstream.errors import ModelError
from slipstream.kept import cache_folder

if TYPE_CHECKING:
    import torch

VERSION = 1  # increased when files are converted differently
HEAD = 32 << 20  # bytes that contain any file's metadata: vocabulary, chat template, table of tensors
SLICES, SLICE = 256, 64 << 10
LEFT_BEHIND = 24 * 3600  # seconds after which an unfinished conversion is deleted


def models_folder() -> Path:
    return cache_folder() / "models"


def ensure(gguf: Path) -> Path:
    """The folder of a GGUF file's checkpoint, which is converted if necessary."""
    to = folder_of(gguf)
    if not is_ready(to):
        print(f"slipstream: converting {gguf.name} once, into {to} …", file=sys.stderr)
        with making(to) as new:
            convert(gguf, new, str(gguf))
    return to


def folder_of(gguf: Path) -> Path:
    """Named by the file's content and the version of transformers, which decides how its numbers are read."""
    import transformers

    return models_folder() / f"{gguf.stem}-{fingerprint(gguf)}-{transformers.__version__}"


def fingerprint(gguf: Path) -> str:
    """A hash of a file's content. Path, size and date may stay the same when a file is replaced, for example by another
    quantisation of the same layout. Reading gigabytes would take seconds at every load, so only evenly spaced slices
    of the weights are read: models that are trained or quantised differently differ nearly everywhere."""
    size = gguf.stat().st_size
    digest = hashlib.sha256(f"{VERSION} {size}".encode())
    last = max(HEAD, size - SLICE)
    with gguf.open("rb") as file:
        digest.update(file.read(HEAD))
        for i in range(SLICES):
            file.seek(HEAD + (last - HEAD) * i // (SLICES - 1))
            digest.update(file.read(SLICE))
    return digest.hexdigest()[:16]


def is_ready(folder: Path) -> bool:
    return (folder / "config.json").is_file()


@contextmanager
def making(to: Path) -> Iterator[Path]:
    """Yield a folder to write, which is renamed to `to` when it is complete. Another process may do the same."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        for left in to.parent.glob(".making-*"):  # from a killed process
            if time.time() - left.stat().st_mtime > LEFT_BEHIND:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=".making-") as made:
            yield Path(made) / "model"
            try:
                (Path(made) / "model").rename(to)
            except OSError:
                if not is_ready(to):  # no other process has finished it meanwhile
                    raise
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"no converted model can be kept in {to.parent}: {error}. Name a folder with room in SLIPSTREAM_CACHE"
        ) from error


def convert(gguf: Path, to: Path, name: str) -> None:
    """Write a GGUF file as a checkpoint of transformers, with its tokenizer if that is usable."""
    import torch

    from slipstream.loading.gguf import log, read_model, read_tokenizer
    from slipstream.loading.messages import explain, quiet_transformers

    with quiet_transformers():
        try:
            model = read_model(gguf)
        except Exception as error:
            raise ModelError(explain(str(gguf), error)) from error
        try:
            tokenizer = read_tokenizer(gguf)
        except Exception as error:  # loading the model will report it
            log.debug("no tokenizer", exc_info=error)
            tokenizer = None
        model.config._name_or_path = name
        for weight in model.parameters():
            weight.data = narrowed(weight.data)
        model.save_pretrained(to)
        model.config.dtype = torch.float32  # saving wrote the first tensor's dtype
        model.config.save_pretrained(to)
        if tokenizer is not None:
            tokenizer.save_pretrained(to)


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """The weight in half precision if that changes none of its values."""
    import torch

    parts = weight.flatten().split(1 << 20)  # mostly the first part decides
    for dtype in (torch.bfloat16, torch.float16):
        if weight.is_floating_point() and all(torch.equal(p.to(dtype).to(p.dtype), p) for p in parts):
            return weight.to(dtype)
    return weight


def listed() -> list[Path]:
    """The folders of all converted models, including the embedded one."""
    return sorted(f for f in models_folder().glob("[!.]*") if is_ready(f))


def size_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir())
