"""Heads: every published layout computes what it defines, survives being written, and is refused where it doesn't fit.

Guesses are compared with a second computation in float64, written here from the layouts' definitions: one position at
a time, one token after the other, as a chain is really drafted.
"""

import json
import math
import pickle
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from families import tiny_model
from published import doubles, write
from slipstream.errors import DrafterError, OptionError
from slipstream.heads import HEADS, export_head, load_head, save_head
from slipstream.heads import checkpoint as head_files

H, V, T = 32, 64, 8


@cache
def target(layers=7, family="llama"):
    return tiny_model(family, seed=3, dtype=torch.float64, num_hidden_layers=layers)


@cache
def text(layers=7, family="llama"):
    """Tokens (2, T) and the hidden states of the target that read them, by number."""
    tokens = torch.randint(0, V, (2, T), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        hidden = target(layers, family)(tokens, output_hidden_states=True).hidden_states
    return tokens, dict(enumerate(hidden))


def states_of(head, layers=7, family="llama"):
    hidden = text(layers, family)[1]
    return head.join({layer: hidden[layer] for layer in head.layers(layers)})


def made_up(shapes, seed=0):
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) * 0.3 for name, shape in shapes.items()}


# ---- the layouts: each writes a folder and gives guess(hidden, tokens, i, k) -> logits of depth k at position i, where
# hidden {number: (t, H)} and tokens (t,) are one row


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def rms(x, eps):
    return x / np.sqrt((x * x).mean() + eps)


def last(hidden, i):
    return hidden[max(hidden)][i]


def embedding():
    return target().get_input_embeddings().weight.detach().numpy()


def lm_head():
    return target().lm_head.weight.detach().numpy()


def medusa(folder, vllm=False):
    heads, blocks = 3, 2
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}  # the file knows better
    tensors = {}
    for h in range(heads):
        for b in range(blocks):
            name = f"blocks.{h}.layers.{b}" if vllm else f"{h}.{b}.linear"
            tensors |= made_up({f"{name}.weight": (H, H)}, 10 * h + b)
            tensors |= {} if vllm else made_up({f"{name}.bias": (H,)}, 50 + 10 * h + b)
        tensors |= made_up({f"lm_heads.{h}.weight" if vllm else f"{h}.{blocks}.weight": (V, H)}, 99 - h)
    if vllm:
        write(folder, {"model_type": "medusa", "num_heads": heads, "hidden_size": H}, tensors)
    else:
        write(folder, config, tensors, "medusa_lm_head.pt")
    w = doubles(tensors)

    def guess(hidden, _tokens, i, k):
        x = last(hidden, i)
        for b in range(blocks):
            name = f"blocks.{k}.layers.{b}" if vllm else f"{k}.{b}.linear"
            x = x + silu(w[f"{name}.weight"] @ x + (0 if vllm else w[f"{name}.bias"]))
        return w[f"lm_heads.{k}.weight" if vllm else f"{k}.{blocks}.weight"] @ x

    return guess


def redrafter(folder, exit_dim=48, rnn=True):
    blocks = 2
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": V,
        "hidden_size": H,
        "exit_dim": exit_dim,
        "num_draft_layers": blocks,
        "num_lookback_tokens": 4,
        "rnn": rnn,
    }
    shapes = {f"lm_head.{blocks}.weight": (V, exit_dim)}
    for b in range(blocks):
        shapes |= {f"lm_head.{b}.linear.weight": (exit_dim, exit_dim), f"lm_head.{b}.linear.bias": (exit_dim,)}
    if exit_dim != 2 * H:
        shapes |= {"input_proj.weight": (exit_dim, 2 * H), "input_proj.bias": (exit_dim,)}
    if rnn:
        shapes |= {"rnn_u.weight": (H, H), "rnn_u.bias": (H,), "rnn_w.weight": (H, H)}
    tensors = made_up(shapes)
    write(folder, config, tensors)
    w = doubles(tensors)

    def guess(hidden, tokens, i, k):
        s = np.zeros(H)
        for token in tokens[i + 1 : i + 2 + k]:
            e = embedding()[token]
            s = silu(w["rnn_w.weight"] @ e + w["rnn_u.weight"] @ s + w["rnn_u.bias"]) if rnn else e + s
        x = np.concatenate([last(hidden, i), s])
        if exit_dim != 2 * H:
            x = w["input_proj.weight"] @ x + w["input_proj.bias"]
        for b in range(blocks):
            x = x + silu(w[f"lm_head.{b}.linear.weight"] @ x + w[f"lm_head.{b}.linear.bias"])
        return w[f"lm_head.{blocks}.weight"] @ x

    return guess


def mlp(folder, tied=False, scale_input=False):
    n, inner = 3, 24
    config = {
        "model_type": "mlp_speculator",
        "vocab_size": V,
        "emb_dim": H,
        "inner_dim": inner,
        "n_predict": n,
        "tie_weights": tied,
        "scale_input": scale_input,
    }
    shapes = {}
    for k in range(1 if tied else n):
        shapes |= {f"emb.{k}.weight": (V, inner), f"head.{k}.weight": (V, inner)}
        shapes |= {f"ln.{k}.weight": (inner,), f"ln.{k}.bias": (inner,)}
    for k in range(2 if tied else n):
        shapes |= {f"proj.{k}.weight": (inner, inner if k else H)}
    tensors = {f"speculator.{name}": t for name, t in made_up(shapes).items()}
    write(folder, config, tensors)
    w = doubles(tensors)

    def guess(hidden, tokens, i, k):
        state = last(hidden, i)
        if scale_input:
            state = rms(state, 1e-6) / math.sqrt(2)
        state_weight = 0.5 ** (0.5 / n)
        token_weight = math.sqrt((1 - state_weight**2) * inner / 2)
        for d in range(k + 1):
            s, p = (0, min(d, 1)) if tied else (d, d)
            z = w[f"speculator.proj.{p}.weight"] @ state
            z = z + token_weight / state_weight * w[f"speculator.emb.{s}.weight"][tokens[i + 1 + d]]
            state = gelu(w[f"speculator.ln.{s}.weight"] * rms(z, 1e-6) + w[f"speculator.ln.{s}.bias"])
        return w[f"speculator.head.{s}.weight"] @ state

    return guess


def turn(v, position, theta, factor):
    """Rotary embedding of one head's vector: the pairs (j, j + d/2) are turned."""
    half = len(v) // 2
    angle = position / factor * theta ** (-2 * np.arange(half) / len(v))
    a, b = v[:half], v[half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])


class Decoder:
    """A Llama layer in float64, one position at a time, with a list as its cache."""

    def __init__(self, w, prefix, heads, kv, d, eps, theta, factor=1.0):
        self.w, self.prefix, self.heads, self.kv, self.d = w, prefix, heads, kv, d
        self.eps, self.theta, self.factor = eps, theta, factor
        self.keys, self.values = [], []

    def linear(self, name, x):
        bias = self.w.get(f"{self.prefix}{name}.bias", 0)
        return self.w[f"{self.prefix}{name}.weight"] @ x + bias

    def __call__(self, x, residual, position):
        q, k, v = (self.linear(f"self_attn.{n}_proj", x).reshape(-1, self.d) for n in "qkv")
        q, k = ([turn(head, position, self.theta, self.factor) for head in heads] for heads in (q, k))
        self.keys.append(k)
        self.values.append(v)
        mixed = []
        for h in range(self.heads):
            g = h // (self.heads // self.kv)
            scores = np.array([q[h] @ key[g] for key in self.keys]) / math.sqrt(self.d)
            weights = np.exp(scores - scores.max())
            mixed.append((weights / weights.sum()) @ np.array([value[g] for value in self.values]))
        h = residual + self.linear("self_attn.o_proj", np.concatenate(mixed))
        y = self.w[f"{self.prefix}post_attention_layernorm.weight"] * rms(h, self.eps)
        return h + self.linear("mlp.down_proj", silu(self.linear("mlp.gate_proj", y)) * self.linear("mlp.up_proj", y))


def layer_shapes(prefix, width, reads, heads, kv, d, inner, qkv_bias=False):
    shapes = {
        f"{prefix}self_attn.q_proj.weight": (heads * d, reads),
        f"{prefix}self_attn.k_proj.weight": (kv * d, reads),
        f"{prefix}self_attn.v_proj.weight": (kv * d, reads),
        f"{prefix}self_attn.o_proj.weight": (width, heads * d),
        f"{prefix}mlp.gate_proj.weight": (inner, width),
        f"{prefix}mlp.up_proj.weight": (inner, width),
        f"{prefix}mlp.down_proj.weight": (width, inner),
        f"{prefix}post_attention_layernorm.weight": (width,),
    }
    if qkv_bias:
        shapes |= {f"{prefix}self_attn.{n}_proj.bias": ((heads if n == "q" else kv) * d,) for n in "qkv"}
    return shapes


def eagle(folder, variant=False):
    """variant: biases at the queries, none at fc, scaled positions, and weights in two files."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    config |= {"bias": False, "qkv_bias": True, "rope_theta": 500.0} if variant else {}
    config |= {"rope_scaling": {"type": "linear", "factor": 2.0}} if variant else {}
    shapes = {"fc.weight": (H, 2 * H), **layer_shapes("layers.0.", H, H, 4, 2, 8, 40, variant)}
    shapes |= {} if variant else {"fc.bias": (H,)}
    tensors = {"embed_tokens.weight": torch.tensor(embedding()), **made_up(shapes)}
    if variant:
        names = sorted(tensors)
        parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
        for file, part in parts.items():
            write(folder, config, {name: tensors[name] for name in part}, file)
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        write(folder, config, tensors, "pytorch_model.bin")
    w = doubles(tensors)

    def guess(hidden, tokens, i, k):
        decoder = Decoder(w, "layers.0.", 4, 2, 8, 1e-5, config.get("rope_theta", 10000.0), 2.0 if variant else 1.0)
        for p in range(i + k + 1):
            if p <= i:
                feature = last(hidden, p)
            e = w["embed_tokens.weight"][tokens[p + 1]]
            x = w["fc.weight"] @ np.concatenate([e, feature]) + w.get("fc.bias", 0)
            feature = decoder(x, x, p)
        return lm_head() @ feature

    return guess


def eagle3(folder, width=H, speculators=False):
    """Its own width: then it brings an embedding along. speculators: named and configured their way, all options on."""
    heads, kv, d, inner, drafts = 4, 2, 12, 40, 24
    prefix = "layers.0." if speculators else "midlayer."
    layer = {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": d,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    if speculators:
        config = {
            "speculators_model_type": "eagle3",
            "speculators_version": "0.3.0",
            "transformer_layer_config": {**layer, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
            "draft_vocab_size": drafts,
            "norm_before_residual": True,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
            "speculators_config": {"verifier": {"name_or_path": "x", "architectures": []}},
        }
    else:
        config = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": drafts, "rope_theta": 700.0}
        config |= {} if width == H else {"target_hidden_size": H}
    shapes = layer_shapes(prefix, width, 2 * width, heads, kv, d, inner)
    shapes |= {f"{prefix}{name}.weight": (width,) for name in ("hidden_norm", "input_layernorm")}
    shapes |= {"fc.weight": (width, 3 * H), "norm.weight": (width,), "lm_head.weight": (drafts, width)}
    shapes |= {"input_norm.weight": (3 * H,)} if speculators else {}
    shapes |= {} if width == H else {"embed_tokens.weight": (V, width)}
    tensors = made_up(shapes)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:drafts].sort().values
    tensors |= {"d2t": ids - torch.arange(drafts), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)}
    write(folder, config, tensors)
    w = doubles(tensors)
    table = embedding() if width == H else w["embed_tokens.weight"]

    def guess(hidden, tokens, i, k):
        decoder = Decoder(w, prefix, heads, kv, d, 1e-5, 700.0)
        for p in range(i + k + 1):
            if p <= i:
                x = np.concatenate([hidden[n][p] for n in ((1, 2, 5) if speculators else (2, 3, 4))])
                feature = w["fc.weight"] @ (w["input_norm.weight"] * rms(x, 1e-5) if speculators else x)
            e = w[f"{prefix}input_layernorm.weight"] * rms(table[tokens[p + 1]], 1e-5)
            f = w[f"{prefix}hidden_norm.weight"] * rms(feature, 1e-5)
            feature = decoder(np.concatenate([e, f]), f if speculators else feature, p)
        return w["lm_head.weight"] @ (w["norm.weight"] * rms(feature, 1e-5))

    return guess


LAYOUTS = {
    "medusa": medusa,
    "medusa of vllm": lambda folder: medusa(folder, vllm=True),
    "redrafter": redrafter,
    "redrafter without projection": lambda folder: redrafter(folder, exit_dim=2 * H),
    "redrafter without recurrence": lambda folder: redrafter(folder, rnn=False),
    "mlp": mlp,
    "mlp tied and scaled": lambda folder: mlp(folder, tied=True, scale_input=True),
    "eagle": eagle,
    "eagle variant": lambda folder: eagle(folder, variant=True),
    "eagle3": eagle3,
    "eagle3 of its own width": lambda folder: eagle3(folder, width=48),
    "speculators": lambda folder: eagle3(folder, speculators=True),
}
DEPTHS = 3


@pytest.fixture(params=LAYOUTS)
def layout(request, tmp_path):
    """A published folder and its guess."""
    return tmp_path, LAYOUTS[request.param](tmp_path)


# ---- what heads compute


@torch.no_grad()
def test_guesses_are_those_the_layout_defines(layout):
    folder, guess = layout
    head = load_head(folder, target())
    tokens, hidden = text()
    predictions = list(head.predict(states_of(head), tokens, DEPTHS))
    assert len(predictions) == DEPTHS
    for row in range(2):
        states = {layer: h[row].numpy() for layer, h in hidden.items()}
        for k, prediction in enumerate(predictions):
            for i in range(T - 1 - k):
                expected = guess(states, tokens[row].numpy(), i, k)
                near = 1e-5 * np.abs(expected).max()  # rotary angles are float32
                np.testing.assert_allclose(prediction.logits[row, i].numpy(), expected, rtol=0, atol=near)


def beams():
    """Three drafts after the root at position 3 of the second text, as rows of tokens."""
    tokens = text()[0][1]
    drafts = torch.tensor([[7, 1, 60], [7, 9, 4], [33, 0, 2]])
    return torch.stack([torch.cat((tokens[:4], draft)) for draft in drafts])


def expected_beams(guess, k):
    hidden = {layer: h[1].numpy() for layer, h in text()[1].items()}
    return np.array([guess(hidden, row, 2, k) for row in beams().numpy()])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["redrafter", "redrafter without recurrence", "mlp", "mlp tied and scaled"])
def test_single_steps_draft_beams(kind, tmp_path):
    guess = LAYOUTS[kind](tmp_path)
    head, rows = load_head(tmp_path, target()), beams()
    h = states_of(head)[1:, 2]  # (1, H)
    state = head.start(h, rows[:1, 3])[:, None].expand(-1, 3, -1)  # (1, 3, ·)
    for k in range(DEPTHS):
        if k:
            state = head.advance(state, rows[None, :, 3 + k], *([] if head.kind == "redrafter" else [k]))
        if head.kind == "redrafter":
            logits = head.logits(h[:, None].expand(-1, 3, -1), state)
        else:
            logits = head.logits(state, k)
        np.testing.assert_allclose(logits[0].numpy(), expected_beams(guess, k), rtol=1e-9, atol=1e-9)


LIKELY = [40, 3, 12, 3, 63]
SORTED = [3, 12, 40, 63]


def drafted(head):
    """What a redrafter says of three states: `logits`, `guess`, `few`."""
    random = torch.Generator().manual_seed(1)
    h, state = (torch.randn(2, n, H, generator=random, dtype=torch.float64).to(head.dtype) for n in (1, 3))
    with torch.no_grad():
        prepared = head.prepare(h)
        return head.logits(h.expand_as(state), state), head.guess(prepared, state), head.few(prepared, state)


@pytest.mark.parametrize(("exit_dim", "layers"), [(None, 2), (None, 1), (48, 3), (2 * H, 2)])
@pytest.mark.parametrize("family", ["llama", "cohere"])  # the second scales its logits
def test_a_redrafter_says_of_the_likely_tokens_what_it_says_of_all(exit_dim, layers, family):
    head = HEADS["redrafter"].fresh(target(3, family), exit_dim=exit_dim, layers=layers, dtype=torch.float64)
    stir(head)
    logits, guess, few = drafted(head)
    torch.testing.assert_close(guess, logits)
    assert torch.equal(few, guess)  # nobody said which are likely
    head.guess_only(LIKELY)
    assert head.likely_ids.tolist() == SORTED
    assert head.draft_ids is None  # training and draws go on with all
    again, guess, few = drafted(head)
    assert torch.equal(again, logits)
    assert few.shape == (2, 3, 4)
    torch.testing.assert_close(few, logits[..., SORTED])


@pytest.mark.parametrize("exit_dim", [None, 48])
def test_what_a_redrafter_made_of_its_weights_is_made_once_and_again_when_they_change(exit_dim):
    head = stir(HEADS["redrafter"].fresh(target(), exit_dim=exit_dim, dtype=torch.float64))
    head.guess_only(LIKELY)
    names, before = set(head.state_dict()), drafted(head)
    made = [tensor.data_ptr() for _, tensor in head._made.values()]
    drafted(head)
    assert [tensor.data_ptr() for _, tensor in head._made.values()] == made
    assert len(made) == 2
    assert set(head.state_dict()) == names
    for name, weight in head.named_parameters():
        if name.startswith(("input_proj", "lm_head")):
            with torch.no_grad():
                weight.add_(0.1)
            logits, guess, few = drafted(head)
            torch.testing.assert_close(guess, logits)
            torch.testing.assert_close(few, logits[..., SORTED])
            assert not torch.allclose(guess, before[1])
    head.guess_only([5, 6, 7, 8])
    assert not head._made  # the new table may lie where the old one lay
    logits, _, few = drafted(head)
    torch.testing.assert_close(few, logits[..., [5, 6, 7, 8]])
    single = drafted(head.float())
    torch.testing.assert_close(single[1], single[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single[0].double(), logits, rtol=1e-3, atol=1e-3)


def test_gradients_reach_what_a_redrafter_makes_of_its_weights():
    head = HEADS["redrafter"].fresh(target(), dtype=torch.float64)
    with torch.no_grad():
        kept = head._joint()
    assert not kept.requires_grad
    assert head._joint().requires_grad


def test_likely_ids_outside_the_vocabulary_are_refused_and_all_of_them_are_no_choice():
    head = HEADS["redrafter"].fresh(target())
    for wrong in ([], [3, 64], [-1]):
        with pytest.raises(OptionError, match="token ids from 0 to 63, at least one"):
            head.guess_only(wrong)
    for everything in (range(V), None):
        head.guess_only([1, 2])
        head.guess_only(everything)
        assert head.likely_ids is None
        assert head.config.draft_vocab_size is None
        assert "d2t" not in head.state_dict()


def test_likely_tokens_of_an_output_matrix_that_cant_be_copied():
    model = tiny_model("llama", seed=3, dtype=torch.float64)
    head = stir(HEADS["redrafter"].fresh(model, dtype=torch.float64))
    head.guess_only(LIKELY)
    before = drafted(head)[2]

    class Other(torch.nn.Linear):
        """As a quantised one would be: whoever reads its values learns nothing."""

    odd = Other(H, V, bias=False, dtype=torch.float64)
    odd.weight = model.lm_head.weight
    model.set_output_embeddings(odd)
    head.bind(model)
    torch.testing.assert_close(drafted(head)[2], before)
    assert head._rows() is None


@torch.no_grad()
def test_all_medusa_heads_in_one_step(tmp_path):
    guess = medusa(tmp_path)
    head = load_head(tmp_path, target())
    logits = head.heads(states_of(head)[:, 2])  # (2, K, V)
    assert logits.shape == (2, 3, V)
    for k in range(3):
        np.testing.assert_allclose(logits[1, k].numpy(), expected_beams(guess, k)[0], rtol=1e-9, atol=1e-9)


class KeptKeys:
    """Attention over a cache that grows: new rows see what was there, and each other up to themselves."""

    def __init__(self):
        self.key = self.value = None

    def __call__(self, query, key, value):
        self.key = key if self.key is None else torch.cat((self.key, key), dim=2)
        self.value = value if self.value is None else torch.cat((self.value, value), dim=2)
        n, all_ = query.shape[2], self.key.shape[2]
        see = torch.ones(n, all_, dtype=torch.bool).tril(all_ - n)
        out = scaled_dot_product_attention(query, self.key, self.value, attn_mask=see, enable_gqa=True)
        return out.transpose(1, 2)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "speculators"])
def test_unrolled_guesses_are_those_of_chains_drafted_with_a_cache(kind, tmp_path):
    LAYOUTS[kind](tmp_path)
    head = load_head(tmp_path, target())
    tokens, states = text()[0], states_of(head)
    unrolled = list(head.predict(states, tokens, DEPTHS))
    for i in range(T - DEPTHS):
        attend, place = KeptKeys(), torch.arange(T).expand(2, -1)
        features = head.step(tokens[:, 1 : i + 2], head.read(states[:, : i + 1]), place[:, : i + 1], attend)[:, -1:]
        for k in range(DEPTHS):
            if k:
                features = head.step(tokens[:, i + 1 + k, None], features, place[:, i + k, None], attend)
            torch.testing.assert_close(unrolled[k].features[:, i], features[:, 0])
            torch.testing.assert_close(unrolled[k].logits[:, i], head.logits(features)[:, 0])


def test_draft_ids_are_the_offsets_of_d2t(tmp_path):
    eagle3(tmp_path)
    head = load_head(tmp_path, target())
    d2t, t2d = (load_file(tmp_path / "model.safetensors")[name] for name in ("d2t", "t2d"))
    assert head.draft_ids.tolist() == [i + offset for i, offset in enumerate(d2t.tolist())]
    assert head.draft_ids.tolist() == t2d.nonzero()[:, 0].tolist()
    assert HEADS["medusa"].fresh(target()).draft_ids is None


def test_rotary_frequencies_keep_their_precision_in_a_half_precision_head(tmp_path):
    eagle3(tmp_path)
    head = load_head(tmp_path, dtype=torch.bfloat16)
    assert head.dtype == torch.bfloat16
    cos, _ = head.midlayer.self_attn.rotary(torch.tensor([[1001]]))
    expected = np.cos(1001 * 700.0 ** (-np.arange(0, 12, 2) / 12))
    np.testing.assert_allclose(cos[0, 0, 0, :6].numpy(), expected, atol=1e-3)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_scaled_rotary_positions_are_those_of_transformers(scaling, tmp_path):
    eagle3(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"rope_scaling": scaling, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    places = torch.tensor([[0, 5, 200]])
    like = LlamaConfig(
        hidden_size=48,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={**scaling, "rope_theta": 700.0},
    )
    expected = LlamaRotaryEmbedding(like)(torch.zeros(1), places)
    for ours, theirs in zip(load_head(tmp_path).midlayer.self_attn.rotary(places), expected, strict=True):
        torch.testing.assert_close(ours[:, 0], theirs)


def test_rotary_positions_that_change_with_the_length_are_refused(tmp_path):
    eagle3(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match="'dynamic'"):
        load_head(tmp_path)


@pytest.mark.parametrize("kind", HEADS)
def test_steps_need_no_values(kind):
    """On the meta device whatever looks at a value fails: nothing here waits for a GPU or depends on data."""
    with torch.device("meta"):
        model = target(family="llama").__class__(target().config)
        untaken = {"pruned": False} if kind == "spire" else {}  # what is cut is compared with its target
        head, h, token = HEADS[kind].fresh(model, **untaken), torch.empty(2, 3, H), torch.empty(2, 3, dtype=torch.long)
        if kind == "medusa":
            shape = head.heads(h[:, 0]).shape
            assert shape == (2, 5, V)
        elif kind in ("redrafter", "mlp"):
            state = head.start(h, token)
            depth = () if kind == "redrafter" else (1,)
            state = head.advance(state, token, *depth)
            shape = (head.logits(h, state) if kind == "redrafter" else head.logits(state, 1)).shape
            assert shape == (2, 3, V)
        elif kind in ("falcon", "dflash", "spire"):
            attend = lambda q, k, v: q[:, :, -3:].transpose(1, 2)  # noqa: E731, ARG005
            if kind == "falcon":
                x, _ = head.steps(head.pairs(token, h), head.no_memory(2))
                found = head.guess(x, x, torch.cat((token, token), 1), attend)
            elif kind == "spire":
                memory = head.read(torch.cat([h] * len(head.layers(7)), dim=-1))
                streams, found = head.step(h, memory, torch.cat((token, token), 1), [attend] * len(memory))
                head.remember(head.left(streams), token, [attend] * len(memory))
            else:
                features = head.read(torch.cat([h] * len(head.layers(7)), dim=-1))
                found = head.fill(token, features, torch.cat((token, token), 1), [attend] * 2)
            assert (head.output if kind == "spire" else head.logits)(found).shape == (2, 3, V)
        else:
            features = head.read(torch.cat([h] * len(head.layers(7)), dim=-1))
            attend = lambda q, k, v: q.transpose(1, 2)  # noqa: E731, ARG005
            shape = head.logits(head.step(token, features, token, attend)).shape
            assert shape == (2, 3, V)


@pytest.mark.parametrize(("kind", "most"), [("medusa", 3), ("mlp", 3)])
def test_depths_beyond_the_reach_of_a_head_are_refused(kind, most, tmp_path):
    LAYOUTS[kind](tmp_path)
    head = load_head(tmp_path, target())
    assert head.reach == most
    with pytest.raises(OptionError, match=f"1 to {most} tokens ahead, not {most + 1}"):
        next(head.predict(states_of(head), text()[0], most + 1))


# ---- fresh heads


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "granite", "cohere", "gpt2"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("medusa", {"tied": True}), ("medusa", {}), ("eagle", {"bias": True}), ("eagle", {}), ("redrafter", {})],
)
def test_a_fresh_head_starts_from_the_targets_own_logits(kind, sizes, family):
    model = target(3, family)
    head = HEADS[kind].fresh(model, dtype=torch.float64, **sizes)
    if kind == "redrafter":  # less what it adds of the token it read
        head.input_proj.weight[:, H:] = 0
    elif kind == "eagle":
        head.fc.weight[:, :H] = 0
    tokens = text(3, family)[0]
    (prediction,) = head.predict(states_of(head, 3, family), tokens, 1)
    torch.testing.assert_close(prediction.logits, model(tokens).logits)


@pytest.mark.parametrize("kind", HEADS)
def test_training_reaches_every_parameter_of_a_fresh_head_and_nothing_of_the_target(kind):
    model = tiny_model("llama", seed=3, dtype=torch.float32)
    head = HEADS[kind].fresh(model, **({"tied": True} if kind == "medusa" else {}))
    tokens = text(3)[0]
    with torch.no_grad():
        hidden = model(tokens, output_hidden_states=True).hidden_states
    states = head.join({layer: hidden[layer] for layer in head.layers(3)})
    for _ in range(2):  # what starts at zero hides what lies before it, for one step
        loss = sum(p.logits.logsumexp(-1).mean() for p in head.predict(states, tokens, 3))
        for parameter in head.parameters():
            parameter.grad = None
        loss.backward()
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    used = {n: p for n, p in head.named_parameters() if kind != "medusa" or int(n.split(".")[0]) < 3}
    assert [name for name, p in used.items() if p.grad is None or not p.grad.any()] == []
    assert all(p.grad is None for p in model.parameters())
    theirs = {p.data_ptr() for p in model.parameters()}
    assert not theirs & {p.data_ptr() for p in head.parameters()}


@pytest.mark.parametrize("kind", HEADS)
def test_a_float32_head_learns_from_a_bfloat16_target(kind):
    model = tiny_model("llama", seed=3, dtype=torch.bfloat16)
    head, tokens = HEADS[kind].fresh(model), text(3)[0]
    with torch.no_grad():
        hidden = model(tokens, output_hidden_states=True).hidden_states
    states = head.join({layer: hidden[layer] for layer in head.layers(3)})
    sum(p.logits.float().logsumexp(-1).mean() for p in head.predict(states, tokens, 2)).backward()
    grads = [p.grad for p in head.parameters() if p.grad is not None]
    assert grads
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("kind", ["medusa", "redrafter", "eagle3"])
def test_a_tied_matrix_is_no_parameter(kind):
    head = HEADS[kind].fresh(target(), **({"tied": True} if kind == "medusa" else {}))
    assert all(p.shape[0] != V for p in head.parameters())
    assert not set(head.state_dict()) & set(head.borrowed)


def test_an_eagle3_head_guesses_among_the_ids_it_was_given():
    model, ids = target(), [40, 3, 12, 3, 63]
    head = HEADS["eagle3"].fresh(model, draft_ids=ids, dtype=torch.float64)
    assert head.draft_ids.tolist() == [3, 12, 40, 63]
    assert head.t2d.nonzero()[:, 0].tolist() == [3, 12, 40, 63]
    everything = HEADS["eagle3"].fresh(model, dtype=torch.float64)  # the same seed, the whole vocabulary
    with torch.no_grad():
        few, all_ = (next(h.predict(states_of(h), text()[0], 1)).logits for h in (head, everything))
    assert everything.draft_ids is None
    torch.testing.assert_close(few, all_[..., [3, 12, 40, 63]])
    copied = HEADS["eagle3"].fresh(model, draft_ids=ids, tied=False)
    torch.testing.assert_close(copied.lm_head.weight.data, model.lm_head.weight.data[[3, 12, 40, 63]].float())
    with pytest.raises(OptionError, match="0 to 63"):
        HEADS["eagle3"].fresh(model, draft_ids=[3, 64])


@pytest.mark.parametrize(
    ("family", "name", "added"),
    [("llama", "norm", 0), ("gemma2", "norm", 1), ("cohere", "norm", 0), ("gpt2", "ln_f", 0)],
)
def test_a_fresh_eagle3_head_norms_to_the_scale_of_its_target(family, name, added):
    model = tiny_model(family, dtype=torch.float64)
    weight = getattr(model.base_model, name).weight.data.uniform_(1, 3, generator=torch.Generator().manual_seed(0))
    head = HEADS["eagle3"].fresh(model, dtype=torch.float64)
    torch.testing.assert_close(head.norm.weight.data, weight + added, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", HEADS)
def test_the_same_seed_makes_the_same_head(kind):
    torch.manual_seed(1)
    one = HEADS[kind].fresh(target(), seed=4)
    torch.manual_seed(2)
    two, other = HEADS[kind].fresh(target(), seed=4), HEADS[kind].fresh(target(), seed=5)
    same = {name: torch.equal(t, other.state_dict()[name]) for name, t in one.state_dict().items()}
    assert all(torch.equal(t, two.state_dict()[name]) for name, t in one.state_dict().items())
    assert kind in ("medusa", "spire") or not all(same.values())  # it starts as its target, whatever the seed


# ---- files


def logits(head, layers=7, family="llama"):
    with torch.no_grad():
        predictions = head.predict(states_of(head, layers, family), text(layers, family)[0], DEPTHS)
        return torch.stack([prediction.logits for prediction in predictions])


@pytest.mark.parametrize("form", ["tied", "untied", "exported"])
def test_a_published_head_survives_being_written(layout, form):
    folder, _ = layout
    head = load_head(folder, target())
    if form == "exported":
        export_head(head, folder / "out")
        back = load_head(folder / "out", target())
    else:
        save_head(head, folder / "out", tied=form == "tied")
        back = load_head(folder / "out", target())
    assert torch.equal(logits(back), logits(head))
    assert back.kind == head.kind


def stir(head):
    """As if trained: every parameter moves."""
    random = torch.Generator().manual_seed(7)
    for parameter in head.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=random, dtype=torch.float64)
    return head


FRESH = {
    "medusa": ("medusa", {"heads": 3}),
    "medusa tied": ("medusa", {"heads": 3, "tied": True}),
    "redrafter": ("redrafter", {}),
    "mlp": ("mlp", {}),
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "eagle3 with few ids": ("eagle3", {"draft_ids": range(5, 40, 2)}),
    "eagle3 untied": ("eagle3", {"draft_ids": range(5, 40, 2), "tied": False}),
}


@pytest.mark.parametrize("layers", [2, 7])
@pytest.mark.parametrize("case", FRESH)
def test_a_trained_head_survives_being_written_in_every_form(case, layers, tmp_path):
    kind, sizes = FRESH[case]
    model = target(layers)
    head = stir(HEADS[kind].fresh(model, dtype=torch.float64, **sizes))
    before = logits(head, layers)
    save_head(head, tmp_path / "tied")
    save_head(head, tmp_path / "untied", tied=False)
    export_head(head, tmp_path / "exported")
    forms = ["tied", "untied", "exported"]
    if kind == "eagle3":
        export_head(head, tmp_path / "speculators", layout="speculators")
        forms.append("speculators")
    for form in forms:
        back = load_head(tmp_path / form, model)
        assert torch.equal(logits(back, layers), before), form
        assert back.config.target_layers == layers
    if kind != "eagle3":  # whose published files leave the embedding to the target
        for form in ("untied", "exported"):
            head = load_head(tmp_path / form)
            assert not head.borrowed
            assert torch.equal(logits(head.bind(model), layers), before)


def test_the_tied_file_leaves_out_what_is_the_targets(tmp_path):
    for case, (kind, sizes) in FRESH.items():
        head = HEADS[kind].fresh(target(), dtype=torch.float64, **sizes)
        save_head(head, tmp_path / case)
        kept = load_file(tmp_path / case / "model.safetensors")
        told = json.loads((tmp_path / case / "config.json").read_text())["slipstream"]
        assert told["kind"] == kind
        if kind == "mlp":  # has everything of its own
            assert told["tied"] == []
            continue
        assert not [name for name, tensor in kept.items() if tensor.shape[0] == V and name != "t2d"], case
        save_head(head, tmp_path / case / "full", tied=False)
        small, large = ((tmp_path / case / p / "model.safetensors").stat().st_size for p in ("", "full"))
        assert large - small > 8 * H * 18 * len(told["tied"])  # the smallest one is (18, H)


def test_a_matrix_that_was_trained_is_kept(tmp_path):
    head = HEADS["medusa"].fresh(target(), heads=2, dtype=torch.float64)
    with torch.no_grad():
        head.get_parameter("1.1.weight")[5, 5] += 1e-9
    save_head(head, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["slipstream"]["tied"] == ["0.1.weight"]
    assert torch.equal(logits_of(load_head(tmp_path, target()), 2), logits_of(head, 2))


def logits_of(head, depths):
    with torch.no_grad():
        return torch.stack([p.logits for p in head.predict(states_of(head), text()[0], depths)])


def test_a_tied_file_needs_its_target(tmp_path):
    save_head(HEADS["redrafter"].fresh(target()), tmp_path)
    with pytest.raises(DrafterError, match=r"lm_head\.2\.weight.*load it with its target, LlamaForCausalLM"):
        load_head(tmp_path)


def test_an_embedding_that_the_target_scales_is_exported_as_it_is_read(tmp_path):
    model = target(3, "gemma3_text")
    head = stir(HEADS["eagle"].fresh(model, dtype=torch.float64))
    export_head(head, tmp_path)
    back = load_head(tmp_path)
    assert back.embedding is not None
    assert torch.equal(logits(back.bind(model), 3, "gemma3_text"), logits(head, 3, "gemma3_text"))


def test_an_embedding_that_is_the_targets_is_not_held_twice(tmp_path):
    eagle(tmp_path)
    assert load_head(tmp_path, target()).embedding is target().get_input_embeddings()
    assert load_head(tmp_path).embedding.weight.shape == (V, H)


def test_exported_files_have_the_published_names(tmp_path):
    model = target()
    export_head(HEADS["medusa"].fresh(model, heads=2, tied=True), tmp_path / "medusa")
    names = torch.load(tmp_path / "medusa" / "medusa_lm_head.pt", weights_only=True).keys()
    assert set(names) == {f"{h}.{name}" for h in range(2) for name in ("0.linear.weight", "0.linear.bias", "1.weight")}
    head = HEADS["eagle3"].fresh(model, draft_ids=range(20))
    layer = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
    inner = {f"{part}.{n}_proj.weight" for part, ns in layer.items() for n in ns}
    inner |= {f"{n}.weight" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    outer = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    for form, prefix in ((None, "midlayer."), ("speculators", "layers.0.")):
        export_head(head, tmp_path / prefix, layout=form)
        tensors = load_file(tmp_path / prefix / "model.safetensors")
        assert set(tensors) == outer | {prefix + name for name in inner}
        assert tensors["lm_head.weight"].shape == (20, H)
    config = json.loads((tmp_path / "layers.0." / "config.json").read_text())
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "LlamaForCausalLM",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert config["transformer_layer_config"]["hidden_size"] == H
    with pytest.raises(OptionError, match="'speculators' of mlp heads"):
        export_head(HEADS["mlp"].fresh(model), tmp_path / "mlp", layout="speculators")


@pytest.mark.parametrize("exit_dim", [None, 48])
def test_likely_ids_are_kept_in_our_files_and_left_out_of_published_ones(exit_dim, tmp_path):
    head = stir(HEADS["redrafter"].fresh(target(), exit_dim=exit_dim, dtype=torch.float64))
    export_head(head, tmp_path / "before")
    head.guess_only(LIKELY)
    save_head(head, tmp_path / "tied", dtype=torch.float32)
    save_head(head, tmp_path / "untied", tied=False)
    export_head(head, tmp_path / "exported")
    for form in ("tied", "untied"):
        back = load_head(tmp_path / form, target())
        assert back.likely_ids.tolist() == SORTED
        assert back.likely_ids.dtype == torch.long
        assert back.config.draft_vocab_size == 4
        near = 1e-5 if form == "tied" else 1e-12
        torch.testing.assert_close(drafted(back)[2], drafted(head)[2], rtol=near, atol=near)
        assert json.loads((tmp_path / form / "config.json").read_text())["slipstream"]["draft_vocab_size"] == 4
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    assert load_head(tmp_path / "exported", target()).likely_ids is None


def test_likely_ids_that_dont_fit_are_refused(tmp_path):
    head = HEADS["redrafter"].fresh(target())
    head.guess_only(LIKELY)

    def spoiled(change, forget=False):
        save_head(head, tmp_path)
        spoil(tmp_path, change)
        if forget:
            config = json.loads((tmp_path / "config.json").read_text())
            del config["slipstream"]["draft_vocab_size"]
            (tmp_path / "config.json").write_text(json.dumps(config))
        return pytest.raises(DrafterError)

    for change, forget, told in (
        (lambda tensors: tensors["d2t"].add_(30), False, "d2t reaches token id 93, but the vocabulary has 64"),
        (lambda tensors: tensors.pop("d2t"), False, "lacks d2t"),
        (lambda tensors: tensors.update(d2t=torch.zeros(5, dtype=torch.long)), False, "d2t is (5,), not (4,)"),
        (lambda _: None, True, "has d2t, unknown to this layout"),
    ):
        with spoiled(change, forget) as caught:
            load_head(tmp_path, target())
        assert told in str(caught.value)
    redrafter(tmp_path / "published")
    assert load_head(tmp_path / "published", target()).likely_ids is None
    spoil(tmp_path / "published", lambda tensors: tensors.update(d2t=torch.zeros(4, dtype=torch.long)))
    with pytest.raises(DrafterError, match="has d2t, unknown to this layout"):
        load_head(tmp_path / "published")


def test_a_write_that_fails_leaves_the_head_that_was_there(tmp_path, monkeypatch):
    head = HEADS["redrafter"].fresh(target(), dtype=torch.float64)
    before = logits(head)
    save_head(head, tmp_path)

    def torn(tensors, path, metadata):  # noqa: ARG001
        path.write_bytes(b"half of it")
        raise OSError("the disk is full")

    monkeypatch.setattr(head_files, "save_file", torn)
    with pytest.raises(OSError, match="full"):
        save_head(stir(head), tmp_path)
    assert torch.equal(logits(load_head(tmp_path, target())), before)


def test_files_may_repeat_what_is_tied_and_leave_out_what_follows(tmp_path):
    guess = mlp(tmp_path / "mlp", tied=True)
    tensors = load_file(tmp_path / "mlp" / "model.safetensors")
    for name in ("emb", "head", "proj"):
        first = 1 if name == "proj" else 0
        tensors[f"speculator.{name}.2.weight"] = tensors[f"speculator.{name}.{first}.weight"].clone()
    save_file(tensors, tmp_path / "mlp" / "model.safetensors")
    head = load_head(tmp_path / "mlp", target())
    hidden = {layer: h[0].numpy() for layer, h in text()[1].items()}
    np.testing.assert_allclose(logits(head)[2, 0, 1], guess(hidden, text()[0][0].numpy(), 1, 2), rtol=1e-9, atol=1e-9)
    tensors["speculator.emb.2.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "mlp" / "model.safetensors")
    with pytest.raises(DrafterError, match=r"has speculator\.emb\.2\.weight, unknown"):
        load_head(tmp_path / "mlp", target())

    eagle3(tmp_path / "eagle3")
    t2d = load_file(tmp_path / "eagle3" / "model.safetensors")["t2d"]
    spoil(tmp_path / "eagle3", lambda tensors: tensors.pop("t2d"))
    assert torch.equal(load_head(tmp_path / "eagle3").t2d, t2d)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": 48}, "a hidden size of 32, but LlamaForCausalLM has 48"),
        ({"vocab_size": 65}, "a vocabulary of 64, but LlamaForCausalLM has 65"),
        ({"num_hidden_layers": 4}, "7 layers, but LlamaForCausalLM has 4"),
    ],
)
@pytest.mark.parametrize("kind", HEADS)
def test_a_wrong_target_is_refused_with_both_numbers(kind, changes, told, tmp_path):
    save_head(HEADS[kind].fresh(target()), tmp_path)
    with pytest.raises(DrafterError, match=f"this {kind} head was made for a target with {told}"):
        load_head(tmp_path, tiny_model("llama", **changes))


def test_states_that_the_target_has_not_are_refused(tmp_path):
    eagle3(tmp_path, speculators=True)
    with pytest.raises(DrafterError, match=r"\(1, 2, 5\), but LlamaForCausalLM has 4 layers"):
        load_head(tmp_path, target(4))


def spoil(folder, change):
    """Apply change to the tensors of a safetensors folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    eagle3(tmp_path, speculators=True)

    def change(tensors):
        del tensors["layers.0.mlp.up_proj.weight"]
        tensors["layers.0.self_attn.g_norm.weight"] = torch.ones(12)
        tensors["norm.weight"] = torch.ones(31)

    spoil(tmp_path, change)
    with pytest.raises(DrafterError) as caught:
        load_head(tmp_path, target())
    message = str(caught.value)
    assert "lacks layers.0.mlp.up_proj.weight;" in message
    assert "has layers.0.self_attn.g_norm.weight, unknown" in message
    assert "norm.weight is (31,), not (32,)" in message


def test_names_in_errors_are_those_of_the_file(tmp_path):
    medusa(tmp_path, vllm=True)
    spoil(tmp_path, lambda tensors: tensors.pop("blocks.1.layers.0.weight"))
    with pytest.raises(DrafterError, match=r"lacks blocks\.1\.layers\.0\.weight$"):
        load_head(tmp_path)


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    redrafter(tmp_path)
    spoil(tmp_path, lambda tensors: tensors.update({"rnn_w.weight": torch.zeros(H, H, dtype=torch.int8)}))
    with pytest.raises(DrafterError, match=r"rnn_w\.weight holds torch\.int8"):
        load_head(tmp_path)


def test_draft_ids_outside_the_vocabulary_are_refused(tmp_path):
    eagle3(tmp_path)
    spoil(tmp_path, lambda tensors: tensors["d2t"].add_(30))
    with pytest.raises(DrafterError, match="d2t reaches token id"):
        load_head(tmp_path)


def test_a_pickle_with_code_is_not_run(tmp_path):
    ran = tmp_path / "ran"

    class Code:
        def __reduce__(self):
            return (ran.write_text, ("x",))

    medusa(tmp_path)
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.0.linear.weight": Code()}, protocol=2))
    with pytest.raises(DrafterError, match="could run code: it was not loaded"):
        load_head(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("config", "names", "told"),
    [
        ({"architectures": ["LagunaDFlash"]}, ["fc.weight", "layers.0.x"], r"a DFlash or DSpark \(LagunaDFlash\) head"),
        ({"speculators_model_type": "hydra"}, ["fc.weight"], "a speculators hydra head"),
    ],
)
def test_heads_that_slipstream_cannot_run_are_refused_by_name(config, names, told, tmp_path):
    write(tmp_path, config, {name: torch.zeros(2) for name in names})
    with pytest.raises(DrafterError, match=f"{tmp_path.name} is {told}, which slipstream does not run yet"):
        load_head(tmp_path)


def test_folders_that_are_no_heads_are_told_so(tmp_path):
    with pytest.raises(DrafterError, match=r"no config\.json \(it holds nothing\)"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DrafterError, match="must hold one file of weights"):
        load_head(tmp_path)
    save_file({"model.embed_tokens.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(DrafterError, match=r"no head that slipstream knows.*begin with model\.embed_tokens\.weight"):
        load_head(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(DrafterError, match="can't be read as weights"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DrafterError, match=r"config\.json can't be read"):
        load_head(tmp_path)
    with pytest.raises(DrafterError, match="is a file"):
        load_head(tmp_path / "config.json")
    with pytest.raises(DrafterError, match="there is no folder"):
        load_head(tmp_path / "nowhere")


def test_a_config_that_lacks_a_size_is_told_so(tmp_path):
    mlp(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_predict": 0}))
    with pytest.raises(DrafterError, match="n_predict of a head must be 1 or more, not 0"):
        load_head(tmp_path)
    del config["emb_dim"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=r"config\.json of .* lacks 'emb_dim'"):
        load_head(tmp_path)


def test_an_index_that_leaves_its_folder_is_refused(tmp_path):
    eagle(tmp_path, variant=True)
    index = {"weight_map": {"fc.weight": "../model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DrafterError, match="points outside its folder"):
        load_head(tmp_path)


def test_a_hub_name_without_network_or_copy_is_told_so():
    with pytest.raises(DrafterError, match="no folder 'nobody/no-such-head', and the model hub gave no such head"):
        load_head("nobody/no-such-head")


def test_an_unbound_head_says_what_it_needs():
    head = HEADS["eagle"].blank(HEADS["eagle"].fresh(target()).config, ["embed_tokens.weight"])
    with pytest.raises(DrafterError, match=r"borrows from its target: call bind\(model\) first"):
        head.embed(torch.zeros(1, dtype=torch.long))
