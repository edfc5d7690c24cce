"""Load a model and its tokenizer from a hub id, a folder, an adapter or a GGUF file; by default the embedded model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import cached_file

from slipstream.errors import ModelError
from slipstream.loading import adapters, converted, embedded, hub
from slipstream.loading.gguf import quick_gguf
from slipstream.loading.messages import explain, quiet_transformers

FROM_THE_HUB = ("revision", "token", "cache_dir", "subfolder", "local_files_only")  # options: where files come from

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

    dtype: by default float32 on a CPU, the checkpoint's own ("auto") elsewhere, where GGUF files, which have none, are
    loaded as bfloat16. options go to transformers' `from_pretrained` (revision, quantization_config, …).
    """
    device = to_device(device)
    given, dtype = dtype, to_dtype(dtype or (torch.float32 if device.type == "cpu" else "auto"))
    place: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if device_map is not None:
        place["device_map"] = device_map
    name = None  # the model's name, if it is not its folder's
    if source is None:
        source, name = embedded.ensure(), embedded.NAME
    elif file := _gguf_file(source, options):
        source, name = converted.ensure(file), str(file)
        options = {k: v for k, v in options.items() if k not in FROM_THE_HUB}
    if name is not None and given is None and device.type != "cpu":
        dtype = torch.bfloat16
    path = Path(source)
    if adapters.is_adapter(path):
        return _load_adapted(path, dtype=dtype, device=device, **place, **options)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(
            f"{path} holds no config.json: name the folder that `save_pretrained` wrote, an adapter's, or a .gguf file"
        )

    try:
        with quiet_transformers(), fetching(source):
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **place, **options)
    except ModelError:
        raise
    except Exception as error:
        if str(source) == embedded.NAME:
            log.warning("the model hub did not give %s: using the embedded copy, whose weights are 4-bit", source)
            return load_model(None, dtype=given, device=device, device_map=device_map, **options)
        raise ModelError(explain(str(source), error)) from error
    if name is not None:
        model.config._name_or_path = name  # not the cache folder it came from
    place.pop("device_map", None)
    tokenizer = _load_tokenizer(source, {**place, **_of_the_hub(options)})
    if device_map is None and not getattr(model, "is_quantized", False):
        model = model.to(device)
    return model.eval(), tokenizer


def _load_adapted(folder: Path, **options: Any) -> tuple[Any, Any]:
    """An adapter's base model with the adapter, and the adapter's tokenizer or else the base model's."""
    config = adapters.read_config(folder)
    adapters.need_peft(folder)
    base = adapters.base_of(folder, config)
    if config.get("revision") and not Path(base).exists():
        options.setdefault("revision", config["revision"])
    model, tokenizer = load_model(base, **options)
    with quiet_transformers():
        model = adapters.put_on(model, folder)
    if adapters.has_tokenizer(folder):
        tokenizer = _load_tokenizer(folder, {"trust_remote_code": options["trust_remote_code"]})
    return model.eval(), tokenizer


def _gguf_file(source: str | Path, options: dict[str, Any]) -> Path | None:
    """The GGUF file, if one is named: by its path, or by `gguf_file` in a folder or hub repository."""
    if name := options.pop("gguf_file", None):
        try:
            return Path(cached_file(source, name, **_of_the_hub(options)))
        except OSError as error:
            raise ModelError(explain(str(source), error)) from error
    path = Path(source)
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise ModelError(f"there is no file {path}")
    return path


def _of_the_hub(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k in FROM_THE_HUB}


def blank_model(source: str | Path, trust_remote_code: bool = False) -> Any:
    """A model made from its config, with names and sizes but no weights. An adapter's is its base model's."""
    place: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    path = Path(source)
    if adapters.is_adapter(path):
        return blank_model(adapters.base_of(path, adapters.read_config(path)), trust_remote_code)
    if path.suffix == ".gguf":
        source, place["gguf_file"] = path.parent, path.name
    try:
        with quiet_transformers(), torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(source, **place)
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        if str(source) == embedded.NAME:  # without the hub: as `load_model`
            return blank_model(embedded.ensure(), trust_remote_code)
        raise ModelError(explain(str(source), error)) from error
    model.config._name_or_path = str(source)
    return model


def load_tokenizer(source: str | Path | None = None, trust_remote_code: bool = False) -> tuple[Any, int]:
    """A tokenizer, of a model or alone, and the number of token ids. Without a source: the embedded model's."""
    source = source if source is not None else embedded.ensure()
    place: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    path = Path(source)
    if file := _gguf_file(source, {}):
        if converted.is_ready(folder := converted.folder_of(file)):
            source = folder
        else:  # no need to convert its weights
            source, place["gguf_file"] = file.parent, file.name
    elif adapters.is_adapter(path) and not adapters.has_tokenizer(path):
        return load_tokenizer(adapters.base_of(path, adapters.read_config(path)), trust_remote_code)
    with quiet_transformers(), quick_gguf(), fetching(source):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **place)
        except Exception as error:
            raise ModelError(explain(str(source), error)) from error
        try:  # a model often has more ids than its tokenizer uses
            config = transformers.AutoConfig.from_pretrained(source, **place)
            return tokenizer, max(len(tokenizer), int(config.get_text_config().vocab_size))
        except Exception:  # a tokenizer without a model
            return tokenizer, len(tokenizer)


@contextmanager
def fetching(source: str | Path) -> Iterator[None]:
    """A block that loads a source. If it is no folder, it comes from the model hub; names that can't are refused before
    the hub is asked."""
    if Path(source).is_dir():
        yield
        return
    if Path(source).exists():
        raise ModelError(f"{source} is a file, but no .gguf file: name a .gguf file, a folder or a hub id")
    if not hub.is_name(str(source)):
        raise ModelError(
            f"there is no folder or file {str(source)!r}, and it can't be a name on the model hub either (owner/name)"
        )
    with hub.asked_once():
        yield


def _load_tokenizer(source: str | Path, place: dict[str, Any]) -> Any:
    try:
        with quiet_transformers(), fetching(source):
            return transformers.AutoTokenizer.from_pretrained(source, **place)
    except Exception as error:  # a model without one still continues token ids
        log.warning("%s came without a usable tokenizer, so prompts must be token ids: %s", source, error)
        return None


def to_device(device: str | torch.device | None) -> torch.device:
    """A device of this machine, after a small test; if none is named, a GPU if there is one."""
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=found).item()  # on `meta` nothing has a value
    except Exception as error:  # each kind of device has its own
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"device {str(device)!r} can't be used: use {' or '.join(there)}. torch says: {reason}"
        ) from error
    return found


def to_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(f"dtype {dtype!r} is unknown: use float32, bfloat16, float16 or auto")
    return found
