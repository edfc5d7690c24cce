"""Published layouts of heads, written to a folder with made-up weights, each with the reference's computation.

Every maker gives guess(hidden, tokens, i, k): the logits of depth k at position i, where hidden {number: (t, H)} and
tokens (t,) are one row. The computation is written from the code that trains or serves the layout, in float64: one
position at a time, one token after the other, as a chain is really drafted. hidden[BEFORE] is the last layer's output
before the final norm.
"""

import json
import math
from functools import cache

import numpy as np
import torch
from safetensors.torch import save_file

from families import tiny_model

H, V, LAYERS, LENGTH = 32, 64, 7, 24
BEFORE = "before the final norm"
HEADS, KV, D, INNER, DRAFTS, EPS = 4, 2, 12, 40, 24, 1e-5


@cache
def target(layers=LAYERS):
    return tiny_model("llama", seed=3, dtype=torch.float64, num_hidden_layers=layers)


@cache
def text():
    """Tokens (LENGTH,), and the states of the target that read them."""
    tokens = torch.randint(0, V, (LENGTH,), generator=torch.Generator().manual_seed(5))
    seen = []
    handle = target().model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        hidden = target()(tokens[None], output_hidden_states=True).hidden_states
    handle.remove()
    return tokens, {**{n: h[0].numpy() for n, h in enumerate(hidden)}, BEFORE: seen[0][0].numpy()}


def made_up(shapes, seed=0):
    """Weights; those of norms are near 1."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) * 0.3 + ("norm" in name) for name, shape in shapes.items()}


def write(folder, config, tensors, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)


def doubles(tensors):
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def embedding():
    return target().get_input_embeddings().weight.detach().numpy()


def lm_head():
    return target().lm_head.weight.detach().numpy()


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def rms(x, weight=1.0, eps=EPS):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def turn(v, position, theta):
    """Rotary embedding of each head's vector (heads, d): the pairs (j, j + d/2) are turned."""
    half = v.shape[1] // 2
    angle = position * theta ** (-2 * np.arange(half) / v.shape[1])
    a, b = v[:, :half], v[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1)


class Decoder:
    """A Llama layer, one position at a time, with lists as its cache. Norms of queries and keys as Qwen 3 has them."""

    def __init__(self, w, prefix, theta=10000.0, window=None, heads=HEADS, kv=KV, d=D):
        self.w, self.prefix, self.theta, self.window = w, prefix, theta, window
        self.heads, self.kv, self.d = heads, kv, d
        self.places, self.keys, self.values = [], [], []

    def weight(self, name):
        return self.w.get(self.prefix + name)

    def linear(self, name, x):
        bias = self.weight(f"{name}.bias")
        return self.weight(f"{name}.weight") @ x + (0 if bias is None else bias)

    def __call__(self, x, residual, position):
        q, k, v = (self.linear(f"self_attn.{n}_proj", x).reshape(-1, self.d) for n in "qkv")
        if (scale := self.weight("self_attn.q_norm.weight")) is not None:
            q, k = rms(q, scale), rms(k, self.weight("self_attn.k_norm.weight"))
        self.places.append(position)
        self.keys.append(turn(k, position, self.theta))
        self.values.append(v)
        q = turn(q, position, self.theta)
        seen = [n for n, p in enumerate(self.places) if self.window is None or p > position - self.window]
        mixed = []
        for h in range(self.heads):
            g = h // (self.heads // self.kv)
            scores = np.array([q[h] @ self.keys[n][g] for n in seen]) / np.sqrt(self.d)
            share = np.exp(scores - scores.max())
            mixed.append(share / share.sum() @ np.array([self.values[n][g] for n in seen]))
        h = residual + self.linear("self_attn.o_proj", np.concatenate(mixed))
        y = rms(h, self.weight("post_attention_layernorm.weight"))
        return h + self.linear("mlp.down_proj", silu(self.linear("mlp.gate_proj", y)) * self.linear("mlp.up_proj", y))


def layer_shapes(prefix, reads, width=H, bias=(), qk_norm=False):
    """bias: the letters of the projections that have one."""
    rows = {"q": HEADS * D, "k": KV * D, "v": KV * D, "o": width}
    shapes = {f"{prefix}self_attn.{n}_proj.weight": (rows[n], reads) for n in "qkv"}
    shapes |= {f"{prefix}self_attn.{n}_proj.bias": (rows[n],) for n in bias}
    shapes |= {f"{prefix}self_attn.{n}_norm.weight": (D,) for n in "qk" if qk_norm}
    return shapes | {
        f"{prefix}self_attn.o_proj.weight": (width, HEADS * D),
        f"{prefix}mlp.gate_proj.weight": (INNER, width),
        f"{prefix}mlp.up_proj.weight": (INNER, width),
        f"{prefix}mlp.down_proj.weight": (width, INNER),
        f"{prefix}post_attention_layernorm.weight": (width,),
    }


def llama_config(**more):
    config = {
        "model_type": "llama",
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
    }
    return {**config, **more}


def speculators(layer=None, **more):
    """A config of the speculators layout."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.7.0",
        "transformer_layer_config": llama_config(**(layer or {})),
        "draft_vocab_size": DRAFTS,
        "norm_before_residual": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x", "architectures": []}},
        **more,
    }


def plain(**more):
    """A config of SafeAILab's layout, which SpecForge and ModelOpt write too."""
    return llama_config(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=DRAFTS, **more)


def eagle3(
    folder,
    config,
    aux=(2, LAYERS // 2, LAYERS - 3),  # which states the reference reads
    prefix="midlayer.",  # of its first layer
    layers=1,
    norm="input_layernorm",  # before the attention of further layers
    bias=(),
    qk_norm=False,
    head=True,  # an output matrix of its own
    ids=True,  # a vocabulary of its own
    aux_norms=(),  # a name for each state's norm
    norm_before_fc=False,
    theta=10000.0,
    window=None,
    rename=str,
):
    drafts = DRAFTS if ids else V
    shapes = layer_shapes(prefix, 2 * H, bias=bias, qk_norm=qk_norm)
    shapes |= {f"{prefix}{name}.weight": (H,) for name in ("hidden_norm", "input_layernorm")}
    for n in range(1, layers):
        shapes |= {**layer_shapes(f"layers.{n}.", H, bias=bias, qk_norm=qk_norm), f"layers.{n}.{norm}.weight": (H,)}
    shapes |= {"fc.weight": (H, len(aux) * H), "norm.weight": (H,)}
    shapes |= {"lm_head.weight": (drafts, H)} if head else {}
    shapes |= {f"{name}.weight": (H,) for name in aux_norms}
    shapes |= {"input_norm.weight": (len(aux) * H,)} if norm_before_fc else {}
    tensors = made_up(shapes)
    chosen = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:drafts].sort().values
    if ids:
        tensors["d2t"] = chosen - torch.arange(drafts)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, chosen, True)
    write(folder, config, {rename(name): tensor for name, tensor in tensors.items()})
    w = doubles(tensors)
    first = config.get("eagle_config") or {}
    normed_residual = config.get("norm_before_residual", first.get("norm_before_residual", False))

    def guess(hidden, tokens, i, k):
        stack = [Decoder(w, prefix if not n else f"layers.{n}.", theta, window) for n in range(layers)]
        for p in range(i + k + 1):
            if p <= i:
                states = [hidden[n][p] for n in aux]
                if aux_norms:
                    states = [rms(s, w[f"{name}.weight"]) for s, name in zip(states, aux_norms, strict=True)]
                x = np.concatenate(states)
                feature = w["fc.weight"] @ (rms(x, w["input_norm.weight"]) if norm_before_fc else x)
            e = rms(embedding()[tokens[p + 1]], w[f"{prefix}input_layernorm.weight"])
            f = rms(feature, w[f"{prefix}hidden_norm.weight"])
            feature = stack[0](np.concatenate([e, f]), f if normed_residual else feature, p)
            for n in range(1, layers):
                feature = stack[n](rms(feature, w[f"layers.{n}.{norm}.weight"]), feature, p)
            normed = rms(feature, w["norm.weight"])
            if config.get("norm_output"):
                feature = normed
        matrix = w["lm_head.weight"] if head else lm_head()[chosen.numpy()]
        return matrix @ normed

    return guess


def eagle(folder, config, prefix="layers.0.", fc="fc", bias=False, extra=None, theta=10000.0, window=None, own=True):
    """EAGLE-1. extra: further tensors. own: with an embedding."""
    shapes = {f"{fc}.weight": (H, 2 * H), **layer_shapes(prefix, H)}
    shapes |= {f"{fc}.bias": (H,)} if bias else {}
    tensors = {**made_up(shapes), **(extra or {})}
    tensors |= {"embed_tokens.weight": torch.tensor(embedding())} if own else {}
    write(folder, config, tensors)
    w = doubles(tensors)

    def guess(hidden, tokens, i, k):
        decoder = Decoder(w, prefix, theta, window)
        for p in range(i + k + 1):
            if p <= i:
                feature = hidden[LAYERS][p]
            both = np.concatenate([embedding()[tokens[p + 1]], feature])
            x = w[f"{fc}.weight"] @ both + w.get(f"{fc}.bias", 0)
            feature = decoder(x, x, p)
        return lm_head() @ feature

    return guess


def medusa(
    folder,
    vllm=False,  # by vLLM's names
    prefix="",
    outputs=3,  # output matrices
    ids=None,  # a token_map
    whole=False,  # matrices with rows for all tokens beside it
    beside=None,  # tensors of a whole model
    shards=False,
    config=None,
):
    """Three heads of one block, each with a bias by FasterDecoding's names."""
    shapes = {}
    for h in range(3):
        block = f"blocks.{h}.layers.0" if vllm else f"{h}.0.linear"
        shapes |= {f"{block}.weight": (H, H)} | ({} if vllm else {f"{block}.bias": (H,)})
    rows = V if ids is None or whole else len(ids)
    shapes |= {f"lm_heads.{h}.weight" if vllm else f"{h}.1.weight": (rows, H) for h in range(outputs)}
    tensors = made_up(shapes)
    stored = {prefix + name: tensor for name, tensor in tensors.items()} | (beside or {})
    stored |= {} if ids is None else {"token_map": ids}
    if vllm or beside:
        about = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "hidden_size": H, **(config or {})}
        names = sorted(stored)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]} if shards else {"model.safetensors": names}
        for file, part in parts.items():
            write(folder, about, {name: stored[name].clone() for name in part}, file)
        if shards:
            index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        about = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
        write(folder, about, stored, "medusa_lm_head.pt")
    w = doubles(tensors)

    def guess(hidden, _tokens, i, k):
        x, block = hidden[LAYERS][i], f"blocks.{k}.layers.0" if vllm else f"{k}.0.linear"
        x = x + silu(w[f"{block}.weight"] @ x + w.get(f"{block}.bias", 0))
        if outputs:
            own = min(k, outputs - 1)
            matrix = w[f"lm_heads.{own}.weight" if vllm else f"{own}.1.weight"]
        else:
            matrix = lm_head()
        return (matrix[ids.numpy()] if whole else matrix) @ x

    return guess


def mlp(folder, bare=False, inner=24, tied=False, kept=(0, 1, 0, 0)):
    """Three depths. kept: of what is tied, the depth whose name is kept, for emb, proj, head and ln."""
    config = {"model_type": "mlp_speculator", "vocab_size": V, "emb_dim": H, "n_predict": 3, "tie_weights": tied}
    config |= {} if inner is None else {"inner_dim": inner}
    size = inner or H
    shapes = {}
    for k in range(1 if tied else 3):
        shapes |= {f"emb.{k}.weight": (V, size), f"head.{k}.weight": (V, size)}
        shapes |= {f"ln.{k}.weight": (size,), f"ln.{k}.bias": (size,)}
    for k in range(2 if tied else 3):
        shapes |= {f"proj.{k}.weight": (size, size if k else H)}
    tensors = made_up(shapes)
    names = {}
    for name in tensors:
        part, k, what = name.split(".")
        moved = tied and (part != "proj" or k == "1")
        number = kept[("emb", "proj", "head", "ln").index(part)] if moved else k
        names[name] = ("" if bare else "speculator.") + f"{part}.{number}.{what}"
    write(folder, config, {names[name]: tensor for name, tensor in tensors.items()})
    w = doubles(tensors)
    state_weight = 0.5 ** (0.5 / 3)
    token_weight = np.sqrt((1 - state_weight**2) * size / 2) / state_weight

    def guess(hidden, tokens, i, k):
        state = hidden[LAYERS][i]
        for d in range(k + 1):
            s, p = (0, min(d, 1)) if tied else (d, d)
            z = w[f"proj.{p}.weight"] @ state + token_weight * w[f"emb.{s}.weight"][tokens[i + 1 + d]]
            state = gelu(rms(z, w[f"ln.{s}.weight"], 1e-6) + w[f"ln.{s}.bias"])
        return w[f"head.{s}.weight"] @ state

    return guess


def zlab(**more):
    """A config of z-lab's layout, for two layers and blocks of 7."""
    about = {"mask_token_id": 9, "target_layer_ids": [1, 4]}
    config = {"architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS, "num_hidden_layers": 2}
    return llama_config(**config, block_size=7, dflash_config=about, **more)


def block_layer(w, prefix, x, context, theta=10000.0):
    """A Qwen 3 layer over a block's places (n, H) behind a text's features (m, H): all see the text and each other."""

    def heads(name, rows):
        return (rows @ w[f"{prefix}self_attn.{name}_proj.weight"].T).reshape(len(rows), -1, D)

    normed = rms(x, w[f"{prefix}input_layernorm.weight"])
    read, m = np.concatenate([context, normed]), len(context)
    q = rms(heads("q", normed), w[f"{prefix}self_attn.q_norm.weight"])
    k, v = rms(heads("k", read), w[f"{prefix}self_attn.k_norm.weight"]), heads("v", read)
    q = np.stack([turn(row, m + n, theta) for n, row in enumerate(q)])
    k = np.stack([turn(row, n, theta) for n, row in enumerate(k)])
    mixed = []
    for h in range(HEADS):
        g = h // (HEADS // KV)
        scores = q[:, h] @ k[:, g].T / np.sqrt(D)
        share = np.exp(scores - scores.max(1, keepdims=True))
        mixed.append(share / share.sum(1, keepdims=True) @ v[:, g])
    h = x + np.concatenate(mixed, 1) @ w[f"{prefix}self_attn.o_proj.weight"].T
    y = rms(h, w[f"{prefix}post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return h + (silu(gate) * up) @ w[f"{prefix}mlp.down_proj.weight"].T


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def dflash(
    folder,
    config,
    aux,  # which states the reference reads
    block,
    mask=9,
    layers=2,
    anchor=False,  # whether the root's place guesses
    rank=0,
    form="vanilla",  # of the bias
    sure=None,  # a confidence, with or without the token's embedding
    own=False,  # an embedding and an output matrix
    ids=False,  # a vocabulary of its own
):
    """z-lab's `dflash/model.py`, DeepSpec's `modeling/dspark`. Beside guess(…) it gives accepted(hidden, tokens, i,
    k): how sure it is of that guess, as a logit."""
    drafts = DRAFTS if ids else V
    shapes = {"fc.weight": (H, len(aux) * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for n in range(layers):
        shapes |= layer_shapes(f"layers.{n}.", H, qk_norm=True) | {f"layers.{n}.input_layernorm.weight": (H,)}
    if own:
        shapes |= {"embed_tokens.weight": (V, H), "lm_head.weight": (drafts, H)}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (V, rank), "markov_head.markov_w2.weight": (drafts, rank)}
    if form == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, H + rank), "markov_head.gate_proj.bias": (rank,)}
    if form == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * rank, 2 * rank + H),
            "markov_head.joint_proj.bias": (3 * rank,),
        }
    if sure is not None:
        shapes |= {"confidence_head.proj.weight": (1, H + rank * sure), "confidence_head.proj.bias": (1,)}
    tensors = made_up(shapes)
    if ids:
        chosen = torch.arange(1, 1 + DRAFTS)
        tensors |= {
            "d2t": chosen - torch.arange(DRAFTS),
            "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, chosen, True),
        }
    write(folder, config, tensors)
    w = doubles(tensors)
    table = w.get("embed_tokens.weight", embedding())
    matrix = w.get("lm_head.weight", lm_head())

    def places(hidden, tokens, i):
        """(block, H) under the last norm."""
        states = np.concatenate([hidden[n][: i + 1] for n in aux], 1)
        context = rms(states @ w["fc.weight"].T, w["hidden_norm.weight"])
        x = table[[tokens[i + 1], *[mask] * (block - 1)]]
        for n in range(layers):
            x = block_layer(w, f"layers.{n}.", x, context)
        return rms(x, w["norm.weight"])

    def guess(hidden, tokens, i, k):
        x = places(hidden, tokens, i)[0 if anchor else 1 :]
        logits, state = matrix @ x[k], np.zeros(rank)
        for d in range(k + 1 if rank else 0):
            e = w["markov_head.markov_w1.weight"][tokens[i + 1 + d]]
            latent = e
            if form == "gated":
                z = w["markov_head.gate_proj.weight"] @ np.concatenate([x[d], e]) + w["markov_head.gate_proj.bias"]
                latent = sigmoid(z) * e
            if form == "rnn":
                z = w["markov_head.joint_proj.weight"] @ np.concatenate([state, e, x[d]])
                keep, new, out = (z + w["markov_head.joint_proj.bias"]).reshape(3, rank)
                state, latent = sigmoid(keep) * state + (1 - sigmoid(keep)) * np.tanh(new), np.tanh(out)
        return logits + (w["markov_head.markov_w2.weight"] @ latent if rank else 0)

    def accepted(hidden, tokens, i, k):
        x = places(hidden, tokens, i)[k if anchor else 1 + k]
        e = w["markov_head.markov_w1.weight"][tokens[i + 1 + k]] if sure else []
        return (w["confidence_head.proj.weight"] @ np.concatenate([x, e]) + w["confidence_head.proj.bias"])[0]

    return guess, accepted


def falcon(folder, k=2, bias=True, qkv_bias=False, own=True):
    """As the paper has it: an LSTM of two layers along the pairs, one layer whose last k positions see each other."""
    config = llama_config(k_mask=k, **({} if bias else {"bias": False}))
    shapes = layer_shapes("layers.0.", H, bias="qkv" if qkv_bias else ())
    for n, reads in enumerate((2 * H, H)):
        shapes |= {f"lstm.weight_ih_l{n}": (4 * H, reads), f"lstm.weight_hh_l{n}": (4 * H, H)}
        shapes |= {f"lstm.bias_{part}_l{n}": (4 * H,) for part in ("ih", "hh") if bias}
    tensors = made_up(shapes) | ({"embed_tokens.weight": torch.tensor(embedding())} if own else {})
    write(folder, config, tensors, "pytorch_model.bin")
    w = doubles(tensors)

    def lstm(pairs):
        """(n, 2H) -> (n, H)."""
        x = pairs
        for n in range(2):
            h, c, out = np.zeros(H), np.zeros(H), []
            for row in x:
                z = w[f"lstm.weight_ih_l{n}"] @ row + w[f"lstm.weight_hh_l{n}"] @ h
                z = z + w.get(f"lstm.bias_ih_l{n}", 0) + w.get(f"lstm.bias_hh_l{n}", 0)
                enter, forget, new, leave = z.reshape(4, H)
                c = sigmoid(forget) * c + sigmoid(enter) * np.tanh(new)
                h = sigmoid(leave) * np.tanh(c)
                out.append(h)
            x = np.stack(out)
        return x

    def guess(hidden, tokens, i, depth):
        features = list(hidden[LAYERS][: i + 1])
        while True:
            n = len(features)
            x = lstm(np.concatenate([embedding()[tokens[1 : n + 1]], np.stack(features)], 1))
            decoder, found = Decoder(w, "layers.0."), []
            for place in range(n):
                decoder(x[place], x[place], place)
            for place in range(n - k, n):  # each sees all there is, itself once
                own = decoder.places.index(place)
                for kept in (decoder.places, decoder.keys, decoder.values):
                    kept.pop(own)
                found.append(decoder(x[place], x[place], place))
            if depth < k:
                return lm_head() @ found[depth]
            features, depth = features + found, depth - k

    return guess
