"""Tiny random models, one per architecture we claim, with windows small enough to matter."""

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slipstream.targets.captured.graph_target import GraphTarget
from slipstream.targets.choose import _probe

VOCABULARY = 64
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen2-sliding": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "mistral": {"sliding_window": 6, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "gemma": {"head_dim": 8},
    # Not every transformers knows that sdpa leaves out its softcapping.
    "gemma2": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "attn_implementation": "eager"},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
    },
    "phi": {"num_key_value_heads": 4},
    "phi3": {"sliding_window": 6},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 3, "n_head": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "olmo2": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {},
    "cohere": {},
    "granite": {},
    "starcoder2": {"sliding_window": 6},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
}

# Models that can't take trees, or not by our means: they get chains, or plain decoding, and a note.
STATEFUL = {
    "gpt_neo": {  # its local layers look back by place in the cache, not by position
        "num_hidden_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "mamba": {"state_size": 8, "intermediate_size": 64, "conv_kernel": 4, "time_step_rank": 4},
    "falcon-alibi": {"alibi": True, "new_decoder_architecture": False, "multi_query": True},
    "qwen3_next": {
        **_EXPERTS,
        "head_dim": 8,
        "shared_expert_intermediate_size": 24,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_hidden_layers": 4,
    },
}


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A random model of the family. Weights are large enough that its texts wander."""
    options = {**_SMALL, **(FAMILIES.get(family) or STATEFUL.get(family) or {}), **changes}
    config = CONFIG_MAPPING[family.partition("-")[0]](**options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.3 if parameter.shape[0] != VOCABULARY else 0.5)
    return model


def graphs(model):
    """A target of fixed steps, as on a GPU, without capture."""
    vocabulary, shapes = _probe(model)
    return GraphTarget(model, shapes, vocabulary)
