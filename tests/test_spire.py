"""spire: what the head says is computed a second time here, token by token; which tokens it sees; its files; its model.

That drafters give what the head says, whatever the order in which a text is shown, is in test_eagle.py; that training
raises what is accepted, in test_training.py.
"""

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from families import tiny_model
from slipstream import LLM, drafters
from slipstream.drafters.base import Hidden, Seen
from slipstream.errors import DrafterError, ModelError, OptionError
from slipstream.heads import HEADS, load_head, save_head
from slipstream.heads.check import check_head
from slipstream.plan.roofline import CHIPS, Shape, drafting_by, drafting_on_part, spire_shape
from slipstream.request import Request
from slipstream.training import recipes
from slipstream.training.losses import LABELS, Weights, token_loss

LAYERS = 5
TEXT = [1 + 17 * i % 61 for i in range(24)]


@cache
def model():
    return tiny_model("llama", seed=3, dtype=torch.float64, num_hidden_layers=LAYERS)


def fresh(**sizes):
    """A head whose every part matters."""
    head = HEADS["spire"].fresh(model(), dtype=torch.float64, **{"layers": 2, "window": 4, "sinks": 2, **sizes})
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=random)
    return head


@cache
def states():
    with torch.no_grad():
        return model()(torch.tensor([TEXT]), output_hidden_states=True).hidden_states


# ---- what it says


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + model().config.rms_norm_eps) * weight


def turned(x, position):
    """One head's vector, rotated to a position."""
    d = len(x)
    theta = model().config.rope_parameters["rope_theta"]
    angle = position * theta ** -(np.arange(0, d, 2) / d)
    a, b = x[: d // 2], x[d // 2 :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])


class ByHand:
    """The head for one text and one path, as its weights say."""

    def __init__(self, head):
        self.c = head.config
        self.w = {name: tensor.detach().numpy() for name, tensor in head.state_dict().items()}
        self.embedding = model().get_input_embeddings().weight.detach().numpy()
        self.output = model().lm_head.weight.detach().numpy()

    def part(self, layer, name, x, heads):
        return (self.w[f"layers.{layer}.self_attn.{name}_proj.weight"] @ x).reshape(heads, self.c.head_dim)

    def key(self, layer, stream, position):
        """A key and a value for each key head."""
        x = rms(stream, self.w[f"layers.{layer}.input_layernorm.weight"])
        keys, values = (self.part(layer, name, x, self.c.num_key_value_heads) for name in "kv")
        return np.stack([turned(k, position) for k in keys]), values

    def layer(self, n, stream, position, seen):
        """seen: keys and values of what is looked at besides the token itself."""
        everything = [*seen, self.key(n, stream, position)]
        x = rms(stream, self.w[f"layers.{n}.input_layernorm.weight"])
        mixed, group = [], self.c.num_attention_heads // self.c.num_key_value_heads
        for h, query in enumerate(self.part(n, "q", x, self.c.num_attention_heads)):
            look = np.array([turned(query, position) @ k[h // group] for k, _ in everything])
            look = np.exp((look - look.max()) / np.sqrt(self.c.head_dim))
            mixed.append(sum(a * v[h // group] for a, (_, v) in zip(look / look.sum(), everything, strict=True)))
        stream = stream + self.w[f"layers.{n}.self_attn.o_proj.weight"] @ np.concatenate(mixed)
        x = rms(stream, self.w[f"layers.{n}.post_attention_layernorm.weight"])
        gate, up, down = (self.w[f"layers.{n}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        g = gate @ x
        return stream + down @ (g / (1 + np.exp(-g)) * (up @ x))

    def says(self, hidden, end, path):
        """Logits after text[:end] and a path that begins with the root. hidden: the target's states."""
        count, c = self.c.num_hidden_layers, self.c
        shown = [t for t in range(end) if c.recent is None or t < c.sinks or t >= end - c.recent]
        memory = [[self.key(n, hidden[c.aux_layers[n]][0, t].numpy(), t) for t in shown] for n in range(count)]
        for position, token in enumerate(path, end):
            streams = [self.embedding[token]]
            for n in range(count):
                streams.append(self.layer(n, streams[n], position, memory[n]))
            for n in range(count):
                left = streams[n]
                if c.feedback:
                    share = np.exp(self.w["feedback_weights"][n])
                    left = sum(a * x for a, x in zip(share / share.sum(), streams, strict=True))
                memory[n].append(self.key(n, left, position))
        return self.output @ rms(streams[-1], self.w["norm.weight"])


ABLATION = [{}, {"feedback": False}, {"activations": False}, {"window": 0}, {"pruned": False, "layers": 1}]


@pytest.mark.parametrize("sizes", ABLATION, ids=str)
def test_the_head_says_what_its_weights_say(sizes):
    head = fresh(**sizes)
    by_hand, tokens = ByHand(head), torch.tensor([TEXT])
    joined = head.join({n: states()[n] for n in head.layers(LAYERS)})
    with torch.no_grad():
        for k, guess in enumerate(head.predict(joined, tokens, 3)):
            for end in (1, 3, 6, 7, 15):
                expected = by_hand.says(states(), end, TEXT[end : end + 1 + k])
                assert guess.logits[0, end - 1].numpy() == pytest.approx(expected, rel=1e-5, abs=1e-5)  # angles


def test_every_option_of_the_ablation_changes_what_it_says():
    said = {}
    for sizes in ({}, *ABLATION, {"sinks": 1}):
        head = HEADS["spire"].fresh(model(), dtype=torch.float64, **{"layers": 2, "window": 4, "sinks": 2, **sizes})
        joined = head.join({n: states()[n] for n in head.layers(LAYERS)})
        with torch.no_grad():
            said[str(sizes)] = torch.stack([g.logits[0, 19] for g in head.predict(joined, torch.tensor([TEXT]), 3)])
    one = said.pop("{}")
    for name, other in said.items():
        changed = (one - other).abs().amax(1) > 1e-3
        # What drafted tokens leave matters from the second on.
        assert changed.tolist() == ([False, True, True] if "feedback" in name else [True] * 3), name


# ---- where it begins


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_cut_that_is_given_the_targets_stream_says_what_the_target_says(family, tiny):
    head = HEADS["spire"].fresh(tiny(family), layers=2)
    assert head._distance(tiny(family)) < 1e-5
    own = dict(tiny(family).named_parameters())
    for name, tensor in head.named_parameters():
        if name.startswith("layers."):
            number, _, rest = name.removeprefix("layers.").partition(".")
            assert torch.equal(tensor, own[f"model.layers.{int(number) + 1}.{rest}"])


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("gpt2", "another form than Llama's.*--no-pruned"),
        ("gemma", "on a few tokens they are .* off"),
        ("granite", "on a few tokens they are .* off"),
        ("mixtral", "differ in layers.0"),
    ],
)
def test_layers_of_another_form_are_refused(family, told, tiny):
    with pytest.raises(ModelError, match=told):
        HEADS["spire"].fresh(tiny(family))
    assert HEADS["spire"].fresh(tiny(family), pruned=False).bound


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"layers": 5}, "layers=5: of the target's 5, 1 to 4 can draft"),
        ({"window": -1}, "window=-1 is out of range"),
        ({"sinks": 0}, "sinks of a head must be 1 or more"),
    ],
)
def test_sizes_that_make_no_sense(sizes, told):
    with pytest.raises(OptionError, match=told):
        HEADS["spire"].fresh(model(), **sizes)


def test_a_quarter_of_the_layers_unless_told():
    head = HEADS["spire"].fresh(tiny_model("llama", num_hidden_layers=8))
    assert head.config.aux_layers == (6, 7)  # the streams that enter the last two


# ---- what it keeps


@pytest.mark.parametrize(("recent", "sinks"), [(4, 1), (3, 2), (1, 1), (7, 5)])
def test_places_are_taken_by_what_is_seen(recent, sinks):
    config = replace(fresh().config, recent=recent, sinks=sinks)
    held = {}
    for t in range(40):
        held[int(config.column(torch.tensor(t)))] = t
        seen = [i for i in range(t + 1) if bool(config.seen(torch.tensor(i), t))]
        assert seen == [i for i in range(t + 1) if i < sinks or i > t - recent]
        assert sorted(held.values()) == seen
        assert sorted(held) == list(range(len(seen)))  # no gaps: a row's first columns are what it sees


def test_a_long_text_takes_no_more_room_than_a_short_one():
    head = fresh(window=6)
    drafter = drafters.make("spire", SimpleNamespace(model=model()), drafter_path=head, depth=2, width=2)
    session, capacity = drafter.begin(Request([1], 10)), drafter.cache.capacity
    size = model().config.hidden_size
    for start in range(0, 6000, 1500):
        hidden = {n: torch.randn(1500, size, dtype=torch.float64) for n in drafter.layers}
        session.observe(Seen([5] * 1500, start, Hidden(hidden)))
    assert len(session.propose(7, SimpleNamespace(nodes=9, depth=9, limit=lambda tree: tree)).tree) > 1
    assert session.length == 5999
    assert drafter.cache.capacity == capacity == 2 + 6 + drafter.room()[0] + 1


@pytest.mark.slow
def test_texts_stay_as_they_are_beyond_the_window(tiny):
    """Alone and in a batch, drawn and not, over a chat that goes on."""
    target = tiny("llama")
    head = HEADS["spire"].fresh(target, window=5)
    prompts = [TEXT, TEXT[:3], TEXT[5:] + TEXT]
    spire, plain = LLM(target, drafter="spire", drafter_path=head), LLM(target, drafter="none")
    for how in ({}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 3, "accept": "rejection"}):
        expected = plain.generate(prompts, max_new_tokens=20, **{**how, "accept": "match"} if how else {})
        found = spire.generate(prompts, max_new_tokens=20, **how)
        if how.get("accept") != "rejection":  # which draws other tokens of the same distribution
            assert [r.tokens for r in found] == [r.tokens for r in expected]
        assert all(len(r.tokens) <= 20 for r in found)


def test_auto_asks_it_like_any_other_head(tiny, tmp_path):
    target = tiny("llama")
    save_head(HEADS["spire"].fresh(target, window=5), tmp_path)
    auto, plain = LLM(target, drafter="auto", heads=str(tmp_path)), LLM(target, drafter="none")
    found, expected = (llm.generate(TEXT, max_new_tokens=20) for llm in (auto, plain))
    assert found.tokens == expected.tokens
    assert [part.kind for part in auto.engine.drafter.parts.values() if hasattr(part, "kind")] == ["spire"]


# ---- what it learns


def test_the_overlap_is_half_of_the_entropy_and_half_of_what_is_rejected():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.2, 0.6]])
    weights = Weights(recipes.find("spire"), labels=LABELS["overlap"])
    found = token_loss(q.log(), torch.tensor([0]), p, weights)
    entropy, accepted = -(p * q.log()).sum(), 0.2 + 0.2 + 0.2
    assert float(found) == pytest.approx(float(0.5 * entropy + 0.5 * (1 - accepted)))


# ---- its files


def test_what_is_saved_is_what_is_loaded(tmp_path):
    head = fresh(window=0, feedback=False, draft_ids=range(3, 60))
    save_head(head, tmp_path)
    again = load_head(tmp_path, model())
    assert again.config == head.config
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in head.state_dict().items())
    report = check_head(tmp_path)
    assert (report.kind, report.misfit) == ("spire", None)
    assert report.reads == "hidden states 3, 4, through 2 layers"
    save_head(fresh(), tmp_path / "seeing")
    assert check_head(tmp_path / "seeing").reads.endswith("2 layers, of the first 2 and the latest 4 tokens")


def about(**change):
    return lambda config: config["spire_config"].update(change)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda config: config.pop("spire_config"), "lacks 'spire_config'"),
        (lambda config: config["spire_config"].pop("sinks"), "lacks 'sinks'"),
        (about(window=0), "window of a head must be 1 or more, not 0"),
        (about(window="64"), "window of a head must be a whole number, not '64'"),
        (about(sinks=1.5), "sinks of a head must be a whole number"),
        (about(states=[3]), "a spire head of 2 layers reads as many states, not 1"),
        (about(states=[3, -4]), "spire_config.states must be whole numbers from 0 on, not -4"),
        (about(states=[3, 5]), r"reads hidden states \(3, 5\)"),
        (about(feedback="yes"), "spire_config.feedback must be true or false, not 'yes'"),
        (about(feedback=False), "has feedback_weights, unknown to this layout"),
        (lambda config: config.update(num_hidden_layers=3), "a spire head of 3 layers reads as many states, not 2"),
        (lambda config: config.update(hidden_size=16), "doesn't hold what its config.json says"),
    ],
)
def test_a_config_that_contradicts_itself(change, told, tmp_path):
    save_head(fresh(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=told):
        load_head(tmp_path, model())


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda t: t.pop("feedback_weights"), "lacks feedback_weights"),
        (lambda t: t["feedback_weights"].fill_(torch.inf), "infinite or no numbers"),
        (lambda t: t.update(feedback_weights=torch.zeros(2, 2)), r"feedback_weights is \(2, 2\), not \(2, 3\)"),
    ],
)
def test_weights_that_are_none(spoil, told, tmp_path):
    save_head(fresh(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(DrafterError, match=told):
        load_head(tmp_path, model())


def test_a_head_is_for_its_own_target(tmp_path):
    save_head(fresh(), tmp_path)
    with pytest.raises(DrafterError, match="made for a target with 5 layers"):
        load_head(tmp_path, tiny_model("llama", num_hidden_layers=4))


# ---- its throughput on paper


def on_paper(layers, hidden, heads, size, inner):
    """As the paper counts: the layers alone, one byte for each number."""
    body = layers * (2 * hidden + 4 * heads * hidden * size + 3 * hidden * inner)
    return Shape(layers, hidden, heads, heads, size, 0, body, windows=(None,) * layers)


@pytest.mark.parametrize(
    ("who", "tokens", "times"), [("spire", 3.401, 2.78), ("magicdec", 3.891, 2.05), ("vanilla", 2.647, 1.36)]
)
def test_the_model_gives_the_papers_throughput(who, tokens, times):
    """A target of 67M parameters, 64 sequences of 512 tokens, drafts of 4, window 64 and a sink."""
    target = on_paper(8, 512, 8, 128, 4096)
    assert (target.dense, spire_shape(target, 2).dense) == (67_117_056, 16_779_264)
    drafts = {
        "spire": spire_shape(target, 2),
        "magicdec": replace(target, windows=(65,) * 8),
        "vanilla": on_paper(4, 256, 8, 64, 2048),
    }
    where = CHIPS["H100"], 64, 512, 4
    found = drafting_by(target, drafts[who], *where, tokens, "float8", launches=False)
    assert found == pytest.approx(times, abs=0.005)
    assert drafting_by(target, drafts[who], *where, tokens, "float8") < found


def test_few_keys_are_what_pays_in_long_texts():
    target, h100 = on_paper(8, 512, 8, 128, 4096), CHIPS["H100"]

    def times(window, context, **options):
        draft = spire_shape(target, 2, window, **options)
        return drafting_by(target, draft, h100, 64, context, 4, 3.401, "float8", launches=False)

    # With all keys a draft of a quarter reads a quarter of them, whatever their number: 3.401 / (4/4 + 1).
    assert times(None, 512) == pytest.approx(times(None, 8192)) == pytest.approx(1.7005)
    assert times(64, 8192) > times(64, 512) > times(64, 128)
    assert times(64, 8192, feedback=False) == times(64, 8192)  # arithmetic is not what it waits for


def test_drafting_on_a_part_is_drafting_by_the_target_itself():
    target = replace(on_paper(8, 512, 8, 128, 4096), windows=(None, 100) * 4)
    where = CHIPS["H200"], 8, 4096, 4, 3.0
    on_part = drafting_on_part(target, *where[:3], 256, *where[3:])
    assert on_part == drafting_by(target, replace(target, windows=(256, 100) * 4), *where)
