"""The log of a training run: log.jsonl, with a line per interval and per evaluation, and TensorBoard."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

NAME = "log.jsonl"


class Log:
    """The log of one run. If it is resumed from a checkpoint, lines after that step are deleted."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        path = folder / NAME
        kept = [line for line in read(path) if line["step"] <= step] if step else []
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = None
        try:
            board = importlib.import_module("torch.utils.tensorboard")
        except ImportError:  # it needs a package of its own
            return
        self._board = board.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """A line has a step, numbers, and lists of numbers by depth."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in line.items():
                for depth, number in enumerate(value if isinstance(value, list) else [value], 1):
                    tag = f"{name}/t+{depth}" if isinstance(value, list) else name
                    if name != "step":
                        self._board.add_scalar(tag, number, line["step"])
            self._board.flush()

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
