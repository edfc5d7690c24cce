"""Adapter folders of PEFT: which base model they name, and whether they are supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.errors import ModelError

PROMPTS = {"PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT"}


def is_adapter(path: Path) -> bool:
    """A folder with an adapter and no model of its own."""
    return (path / "adapter_config.json").is_file() and not (path / "config.json").is_file()


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def read_config(folder: Path) -> dict[str, Any]:
    """The adapter's settings. Raise if it is not supported, before its base model is loaded."""
    path = folder / "adapter_config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind = config["peft_type"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path} is no adapter's settings as PEFT writes them: {error!r}") from error
    check_kind(str(folder), kind, bool(config.get("alora_invocation_tokens")))
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise ModelError(f"{folder} is an adapter for {task}: slipstream continues text, which takes CAUSAL_LM")
    return config


def check_kind(name: str, kind: str, invoked: bool = False) -> None:
    """Raise if an adapter does more than change weights. invoked: certain tokens activate it (activated LoRA)."""
    if kind in PROMPTS:
        raise ModelError(
            f"{name} carries a {kind} adapter, which puts virtual tokens before the text: "
            "only adapters that change weights (LoRA and its kin) work here"
        )
    if invoked or kind == "XLORA":
        raise ModelError(
            f"{name} carries an {'activated LoRA' if invoked else kind} adapter, whose weights depend on tokens read "
            "before: only adapters that change weights once and for all (LoRA and its kin) work here"
        )


def base_of(folder: Path, config: dict[str, Any]) -> str:
    """The base model that an adapter names: a folder or file if there is one, a hub id otherwise.

    PEFT saves the path that was given to training. A relative one is searched for in the working directory, as PEFT
    does, and then next to the adapter, for folders that were moved together.
    """
    base = config.get("base_model_name_or_path")
    if not base:
        raise ModelError(
            f"{folder} names no base model: set base_model_name_or_path in its adapter_config.json, or put the adapter "
            "on a model with peft and pass the model object"
        )
    for place in (Path(), folder, folder.parent):
        if (found := place / Path(base).expanduser()).exists():
            return str(found)
    if base.startswith(("/", "./", "../", "~")):
        raise ModelError(
            f"{folder} is an adapter for the model in {base}, which is not there: "
            "correct base_model_name_or_path in its adapter_config.json"
        )
    return str(base)


def need_peft(folder: Path) -> None:
    """Raise if peft is missing, before the model is loaded."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"{folder} is an adapter, which needs peft: `pip install peft`, or slipstream-llm[lora]"
        ) from error


def put_on(model: Any, folder: Path) -> Any:
    """The model with the adapter. It is not merged into the weights, since that would round differently."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, folder)
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"the adapter {folder} does not fit {type(model).__name__}: {text}") from error
