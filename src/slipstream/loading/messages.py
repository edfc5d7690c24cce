"""transformers' messages while it loads: silenced, and its errors explained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging


def explain(source: str, error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    if "trust_remote_code" in text:
        return (
            f"{source} runs code of its own from the repository, which slipstream never does unasked: "
            "read that code, then pass trust_remote_code=True"
        )
    if isinstance(error, OSError) and not Path(source).exists():
        return f"there is no folder or file {source!r}, and the model hub gave no such model: {text.splitlines()[0]}"
    return f"{source} can't be loaded: {text}"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the messages and progress bars of libraries during a block."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    bar = modeling_gguf_pytorch_utils.tqdm  # the GGUF reader's bar can't be switched off
    modeling_gguf_pytorch_utils.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
