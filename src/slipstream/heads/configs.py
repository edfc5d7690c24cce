"""The config.json of a head in its published layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from slipstream.heads.base import EMBEDDING, Head
from slipstream.heads.dflash import DFlash, DFlashConfig
from slipstream.heads.eagle import Eagle
from slipstream.heads.eagle3 import Eagle3, Eagle3Config
from slipstream.heads.falcon import Falcon
from slipstream.heads.layer_config import LayerConfig
from slipstream.heads.medusa import Medusa
from slipstream.heads.mlp import MLPSpeculator
from slipstream.heads.redrafter import ReDrafter
from slipstream.heads.spire import Spire

VERSION = 1  # of slipstream's own fields
_DEPTHS = 5  # tokens to draft that an exported head recommends


def published_config(head: Head) -> dict[str, Any]:
    """The fields of the published config.json."""
    fields = _FIELDS[head.kind](head)
    if isinstance(head, Medusa):  # the only layout without a dtype
        return fields
    return {**fields, "torch_dtype": str(head.dtype).removeprefix("torch.")}


def _medusa(head: Medusa) -> dict[str, Any]:
    c = head.config
    return {
        "medusa_num_heads": c.heads,
        "medusa_num_layers": c.blocks,
        "base_model_name_or_path": c.target,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "medusa_fc_bias": True,  # without it vLLM leaves the biases out
        **({} if c.draft_vocab_size is None else {"truncated_vocab_size": c.draft_vocab_size}),
    }


def _redrafter(head: ReDrafter) -> dict[str, Any]:
    c = head.config
    return {
        "model_type": "recurrent_drafting_drafter",
        "architectures": ["Drafter"],
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "exit_dim": c.exit_dim,
        "num_draft_layers": c.num_draft_layers,
        "rnn": c.rnn,
    }


def _mlp(head: MLPSpeculator) -> dict[str, Any]:
    c = head.config
    return {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": c.vocab_size,
        "emb_dim": c.hidden_size,
        "inner_dim": c.inner_dim,
        "n_predict": c.n_predict,
        "top_k_tokens_per_head": [max(5 - k, 1) for k in range(c.n_predict)],  # vLLM wants one per depth
        "tie_weights": c.tie_weights,
        "scale_input": c.scale_input,
    }


def _eagle(head: Eagle) -> dict[str, Any]:
    c = head.config
    biases = {"bias": c.bias, "attention_bias": c.o_bias, "qkv_bias": c.qkv_bias}
    return {"architectures": ["LlamaForCausalLM"], **_llama(c, c.hidden_size), **biases}


def _eagle3(head: Eagle3) -> dict[str, Any]:
    c = head.config
    fields: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if c.qk_norm else "LlamaForCausalLMEagle3"],
        **_llama(c, c.width),
        "draft_vocab_size": c.draft_vocab_size,
    }
    if EMBEDDING not in head.borrowed:
        fields["target_hidden_size"] = c.hidden_size
    if c.aux_layers is not None:
        fields["eagle_aux_hidden_state_layer_ids"] = list(c.aux_layers)
        fields |= _states(c)
    norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return fields | {name: True for name in norms if getattr(c, name)}


def _falcon(head: Falcon) -> dict[str, Any]:
    c = head.config
    own = {"k_mask": c.block, "bias": c.bias, "qkv_bias": c.qkv_bias}
    return {"architectures": ["LlamaForCausalLM"], **_llama(c, c.hidden_size), **own}


def _llama(c: LayerConfig, width: int) -> dict[str, Any]:
    kinds = ["full_attention" if c.window(n) is None else "sliding_attention" for n in range(c.num_hidden_layers)]
    window = next((size for size in c.windows if size is not None), None)
    sliding = {"sliding_window": window, "layer_types": kinds} if window is not None else {}
    return {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": width,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": c.hidden_act,
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.rope_scaling is None else dict(c.rope_scaling),
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": c.qkv_bias,
        **sliding,
    }


def _dflash(head: DFlash) -> dict[str, Any]:
    """DeepSpec's layout if the root's position predicts, else z-lab's."""
    c = head.config
    fields = {**_llama(c, c.hidden_size), "block_size": c.block_size, "num_target_layers": c.target_layers}
    ids = [number - 1 for number in c.aux_layers]
    if c.draft_vocab_size != c.vocab_size:
        fields["draft_vocab_size"] = c.draft_vocab_size
    if c.from_anchor:
        fields |= {"architectures": ["Qwen3DSparkModel"], "mask_token_id": c.mask_token_id, "target_layer_ids": ids}
        return fields | {"num_anchors": 512, **_spark(c)}
    fields["architectures"] = ["DFlashDraftModel"]
    fields["dflash_config"] = {"mask_token_id": c.mask_token_id, "target_layer_ids": ids}
    return fields | (_spark(c) if c.markov_rank is not None or c.confidence else {})


def _spark(c: DFlashConfig) -> dict[str, Any]:
    """The fields of DSpark's parts."""
    return {
        "markov_rank": c.markov_rank or 0,
        "markov_head_type": c.markov_type,
        "enable_confidence_head": c.confidence,
        "confidence_head_with_markov": c.confidence_with_markov,
    }


def _spire(head: Spire) -> dict[str, Any]:
    """There is no published layout of spire heads, so these fields are slipstream's own."""
    c = head.config
    own = {"states": list(c.aux_layers), "window": c.recent, "sinks": c.sinks, "feedback": c.feedback}
    shape = {"architectures": ["SpireDraftModel"], **_llama(c, c.hidden_size)}
    return {**shape, "draft_vocab_size": c.draft_vocab_size, "spire_config": own}


_FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "medusa": _medusa,
    "redrafter": _redrafter,
    "mlp": _mlp,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "falcon": _falcon,
    "dflash": _dflash,
    "spire": _spire,
}


def _states(c: Eagle3Config) -> dict[str, int]:
    """The field that vLLM needs if the number of states is not three."""
    return {} if c.states == 3 else {"num_aux_hidden_states": c.states}


def speculators_config(head: Eagle3 | DFlash) -> dict[str, Any]:
    c: Any = head.config
    if isinstance(head, Eagle3):
        kind, width, ahead, own = "eagle3", c.width, _DEPTHS, _speculators_eagle3(head)
        more = _states(c)
    else:
        spark = c.markov_rank is not None or c.confidence
        kind, width, ahead, more = "dspark" if spark else "dflash", c.hidden_size, head.reach, {}
        own = {
            "architectures": ["DSparkSpeculator" if spark else "DFlashSpeculator"],
            "block_size": c.block_size,
            "mask_token_id": c.mask_token_id,
            "aux_hidden_state_layer_ids": list(c.aux_layers),
            "sample_from_anchor": c.from_anchor,
            **(_spark(c) if spark else {}),
        }
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.hidden_size if c.hidden_size != width else None,
        **own,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
        "transformer_layer_config": {**_llama(c, width), **more},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": ahead,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": c.target,
                "architectures": list(head.lender.architectures) if head.bound else [],
            },
        },
    }


def _speculators_eagle3(head: Eagle3) -> dict[str, Any]:
    c = head.config
    aux = c.aux_layers if c.target_layers is None else head.aux_ids(c.target_layers)
    return {
        "architectures": ["Eagle3DraftModel"],
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "eagle_aux_hidden_state_layer_ids": None if aux is None else list(aux),
        "embed_requires_grad": False,
    }


def spell_speculators(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name)
