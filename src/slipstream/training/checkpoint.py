"""Checkpoints: everything that a run needs to be resumed as if it had not stopped. One file, replaced atomically."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import OptionError

NAME = "checkpoint.pt"


def check_folder(folder: Path, resume: bool) -> None:
    """Raise unless the folder is new or, for resuming, has a checkpoint."""
    if resume and not (folder / NAME).is_file():
        raise OptionError(f"{folder} holds no checkpoint to go on from: leave --resume out, and name a new folder")
    if not resume and folder.exists() and any(folder.iterdir()):
        raise OptionError(f"{folder} is there already: go on with --resume, or name a new folder")


def save(folder: Path, state: dict[str, Any]) -> None:
    state = {**state, "random": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda_random"] = torch.cuda.get_rng_state()
    fresh = folder / (NAME + ".new")
    torch.save(state, fresh)
    os.replace(fresh, folder / NAME)


def load(folder: Path, setup: dict[str, Any]) -> dict[str, Any]:
    """The saved state. Raise if it has another setup."""
    path = folder / NAME
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    before = {"dtype": setup.get("dtype"), **state["setup"]}  # which older ones do not have
    both = {name: (before.get(name), setup.get(name)) for name in {**before, **setup}}
    different = {name: (old, new) for name, (old, new) in both.items() if old != new}
    if different:
        changes = "; ".join(f"{name} was {old}, now {new}" for name, (old, new) in different.items())
        raise OptionError(
            f"the run in {folder} was started otherwise: {changes}. Go on with the same, or start a new one"
        )
    torch.set_rng_state(state["random"])
    if "cuda_random" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_random"])
    return state


def remove(folder: Path) -> None:
    (folder / NAME).unlink(missing_ok=True)
