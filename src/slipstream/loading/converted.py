"""GGUF files as ordinary checkpoints in the user's cache folder: each is converted once, by whoever loads it first.

Weights keep their float32 values, bit for bit, whatever they are loaded as later; those that half precision holds
exactly are stored so.
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

VERSION = 1  # one more when a file would be converted differently
HEAD = 32 << 20  # bytes that hold any file's metadata: vocabulary, chat template, table of tensors
SLICES, SLICE = 256, 64 << 10
LEFT_BEHIND = 24 * 3600  # seconds after which an unfinished conversion is nobody's any more


def models_folder() -> Path:
    return cache_folder() / "models"


def ensure(gguf: Path) -> Path:
    """The folder of a GGUF file's checkpoint, converted first if need be."""
    to = folder_of(gguf)
    if not is_ready(to):
        print(f"slipstream: converting {gguf.name} once, into {to} …", file=sys.stderr)
        with making(to) as new:
            convert(gguf, new, str(gguf))
    return to


def folder_of(gguf: Path) -> Path:
    """Named for the file's content, and for the version of transformers, which decides what its numbers mean."""
    import transformers

    return models_folder() / f"{gguf.stem}-{fingerprint(gguf)}-{transformers.__version__}"


def fingerprint(gguf: Path) -> str:
    """Tells files apart by what is in them: a path, a size or a date may stay when another file takes their place, as
    another quantisation of the same layout does. Reading gigabytes would take seconds at every load, so of the weights
    only evenly spread slices are read: a model trained or quantised differently differs nearly everywhere."""
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
    """A folder to write, which becomes `to` when it is complete: whole or not at all, whoever else makes the same."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        for left in to.parent.glob(".making-*"):  # of a process that was killed
            if time.time() - left.stat().st_mtime > LEFT_BEHIND:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=".making-") as made:
            yield Path(made) / "model"
            try:
                (Path(made) / "model").rename(to)
            except OSError:
                if not is_ready(to):  # nobody else finished it meanwhile
                    raise
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"no converted model can be kept in {to.parent}: {error}. Name a folder with room in SLIPSTREAM_CACHE"
        ) from error


def convert(gguf: Path, to: Path, name: str) -> None:
    """Write a GGUF file as a checkpoint of transformers, with its tokenizer where it has a usable one."""
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
        except Exception as error:  # loading will say that there is none
            log.debug("no tokenizer", exc_info=error)
            tokenizer = None
        model.config._name_or_path = name
        for weight in model.parameters():
            weight.data = narrowed(weight.data)
        model.save_pretrained(to)
        model.config.dtype = torch.float32  # as all of them were: saving took the first one's
        model.config.save_pretrained(to)
        if tokenizer is not None:
            tokenizer.save_pretrained(to)


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """The weight in half precision if that changes none of its values."""
    import torch

    parts = weight.flatten().split(1 << 20)  # the first one will mostly tell
    for dtype in (torch.bfloat16, torch.float16):
        if weight.is_floating_point() and all(torch.equal(p.to(dtype).to(p.dtype), p) for p in parts):
            return weight.to(dtype)
    return weight


def listed() -> list[Path]:
    """The folders of all converted models, the embedded one among them."""
    return sorted(f for f in models_folder().glob("[!.]*") if is_ready(f))


def size_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.iterdir())
