"""From what a user names (a hub id, a folder, a GGUF file, nothing at all) to a model and its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

from slipstream import embedded
from slipstream.errors import ModelError

log = logging.getLogger("slipstream")


def load_model(
    source: str | Path | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """The model in evaluation mode, and its tokenizer. Without a source: the embedded model.

    dtype: float32 on a CPU unless you say otherwise, the checkpoint's own elsewhere ("auto").
    options go to transformers' `from_pretrained` (revision, quantization_config, attn_implementation, …).
    """
    place: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    ours = source is None
    source = source if source is not None else embedded.ensure()
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}")
        source, place["gguf_file"] = path.parent, path.name
    elif path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json: name the folder that `save_pretrained` wrote, or a .gguf file")

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = to_dtype(dtype or (torch.float32 if device.type == "cpu" else "auto"))
    if device_map is not None:
        place["device_map"] = device_map
    try:
        with quiet_transformers():
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **place, **options)
    except Exception as error:
        if str(source) == embedded.NAME:
            log.warning("the model hub did not give %s: using the embedded copy, whose weights are 4-bit", source)
            return load_model(None, dtype=dtype, device=device, device_map=device_map, **options)
        raise ModelError(_explain(str(source), error)) from error
    if ours:
        model.config._name_or_path = embedded.NAME  # not the cache folder it came from
    place.pop("device_map", None)
    shared = {
        k: v for k, v in options.items() if k in ("revision", "token", "cache_dir", "subfolder", "local_files_only")
    }
    tokenizer = _load_tokenizer(source, {**place, **shared})
    if device_map is None and not getattr(model, "is_quantized", False):
        model = model.to(device)
    return model.eval(), tokenizer


def load_tokenizer(source: str | Path | None = None, trust_remote_code: bool = False) -> tuple[Any, int]:
    """A tokenizer, of a model or by itself, and how many ids there are. Without a source: the embedded model's."""
    source = source if source is not None else embedded.ensure()
    place: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if Path(source).suffix == ".gguf":
        source, place["gguf_file"] = Path(source).parent, Path(source).name
    with quiet_transformers():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **place)
        except Exception as error:
            raise ModelError(_explain(str(source), error)) from error
        try:  # a model often has more ids than its tokenizer uses
            config = transformers.AutoConfig.from_pretrained(source, **place)
            return tokenizer, max(len(tokenizer), int(config.get_text_config().vocab_size))
        except Exception:  # a tokenizer by itself
            return tokenizer, len(tokenizer)


def _load_tokenizer(source: str | Path, place: dict[str, Any]) -> Any:
    try:
        with quiet_transformers():
            return transformers.AutoTokenizer.from_pretrained(source, **place)
    except Exception as error:  # a model without one still continues token ids
        log.warning("%s came without a usable tokenizer, so prompts must be token ids: %s", source, error)
        return None


def to_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(f"dtype {dtype!r} is unknown: use float32, bfloat16, float16 or auto")
    return found


def _explain(source: str, error: Exception) -> str:
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
    """Loading shows our own progress, or none: not one bar per library."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    bar = modeling_gguf_pytorch_utils.tqdm  # the GGUF reader has a bar that nothing switches off
    modeling_gguf_pytorch_utils.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
