"""Reader of Medusa's layouts: FasterDecoding's, alone or within a whole model, and vLLM's."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from slipstream.heads.medusa import Medusa, MedusaConfig
from slipstream.heads.published import Json, Published, Tensors, check_ids, count, whole

NAMES = r"(medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers\.\d+)\."  # of a block's tensors


def read_medusa(config: Json, tensors: Tensors) -> Published:
    """The number of heads comes from the tensors, since published configs don't always have it."""
    prefix = next((m[1] or "" for name in tensors if (m := re.match(NAMES, name))), "")
    inside = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    vllm = any(name.startswith("blocks.") for name in inside)
    blocks = _numbers(r"blocks\.(\d+)\.layers\.(\d+)\.weight" if vllm else r"(\d+)\.(\d+)\.linear\.weight", inside)
    if not blocks:
        raise ValueError("a Medusa head must hold residual blocks, but its file has none")
    heads, depth = {head for head, _ in blocks.values()}, len({block for _, block in blocks.values()})
    if config.get("original_lm_head") and "lm_heads.0.weight" in inside:  # one for all
        inside |= {f"lm_heads.{head}.weight": inside["lm_heads.0.weight"] for head in heads}
    outputs = _numbers(r"lm_heads\.(\d+)(\.)weight" if vllm else r"(\d+)\.(\d+)\.weight", inside)
    few, vocabulary = _tokens(config, inside, list(outputs))
    block = inside[next(iter(blocks))]  # (H, H)
    sizes = MedusaConfig(
        vocab_size=vocabulary,
        hidden_size=block.shape[0],
        target=config.get("base_model_name_or_path"),
        heads=len(heads | {head for head, _ in outputs.values()}),
        blocks=depth,
        draft_vocab_size=None if few is None else len(few),
    )

    def spell(name: str) -> str:
        match = re.fullmatch(r"(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)", name)
        if match is None:
            return name
        head, part, what = match.groups()
        theirs = f"lm_heads.{head}.weight" if int(part) == depth else f"blocks.{head}.layers.{part}.{what}"
        return prefix + (theirs if vllm else name)

    names = {spell(name): name for name in Medusa.blank(sizes).state_dict()}
    own = {names.get(prefix + name, name): tensor for name, tensor in inside.items()}
    odd = _odd(config, own, vllm, sizes)
    if few is None:
        own.pop("token_map", None)
    if vllm and not any(name.endswith(".bias") for name in inside):  # there a bias is optional
        own |= {name: block.new_zeros(len(block)) for name in names.values() if name.endswith(".bias")}
    borrowed = frozenset() if outputs else frozenset(Medusa.lendable(sizes))
    form = "vLLM" if vllm else "FasterDecoding, within a whole model" if prefix == "medusa_head." else "FasterDecoding"
    return Published(Medusa, sizes, own, borrowed, spell, f"Medusa ({form})", odd)


def _numbers(pattern: str, tensors: Tensors) -> dict[str, tuple[str, str]]:
    """The names that match the pattern, with the two numbers in each."""
    found = {name: re.fullmatch(pattern, name) for name in tensors}
    return {name: (match[1], match[2]) for name, match in found.items() if match}


def _tokens(config: Json, tensors: Tensors, outputs: list[str]) -> tuple[Tensor | None, int]:
    """(V',) the heads' own vocabulary, None: all; and the size of the target's vocabulary. vLLM reads a token_map only
    if config.json has `truncated_vocab_size`; then rows of other tokens are dropped."""
    most, few = config.get("vocab_size"), config.get("truncated_vocab_size")
    if "token_map" not in tensors or few is None or most is None or few >= most:
        if outputs:
            return None, len(tensors[outputs[0]])
        if most is None:
            raise ValueError(
                "neither config.json nor an output matrix says how large the vocabulary is: name its target"
            )
        return None, count(config, "vocab_size")
    ids = tensors["token_map"] = check_ids("token_map", whole("token_map", tensors["token_map"]), most)
    for name in outputs:
        if len(tensors[name]) == most:
            tensors[name] = tensors[name][ids]
    return ids, count(config, "vocab_size")


def _odd(config: Json, tensors: Tensors, vllm: bool, sizes: MedusaConfig) -> tuple[str, ...]:
    odd = []
    if "token_map" in tensors and sizes.draft_vocab_size is None:
        odd.append("token_map is in the file and not read: config.json says no truncated_vocab_size, so vLLM skips it")
    if vllm and any(name.endswith(".bias") for name in tensors) and not config.get("medusa_fc_bias"):
        odd.append("the blocks have biases, and config.json says no medusa_fc_bias: vLLM would leave them out")
    if not vllm and not _repeated(tensors, sizes.heads, sizes.blocks):
        odd.append("a head's blocks differ, and are computed one after the other: FasterDecoding repeats a single one")
    return tuple(odd)


def _repeated(tensors: Tensors, heads: int, blocks: int) -> bool:
    """Whether each head's blocks are all the same."""
    pairs = [
        (tensors.get(f"{h}.0.linear.{what}"), tensors.get(f"{h}.{b}.linear.{what}"))
        for h in range(heads)
        for b in range(1, blocks)
        for what in ("weight", "bias")
    ]
    return all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)
