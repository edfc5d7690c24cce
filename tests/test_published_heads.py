"""Heads as others publish them: what is drafted is what the reference code computes, for six tokens and for a tree."""

from functools import cache, partial

import numpy as np
import pytest
import torch

from published import (
    BEFORE,
    DRAFTS,
    LAYERS,
    LENGTH,
    H,
    V,
    dflash,
    eagle,
    eagle3,
    falcon,
    llama_config,
    medusa,
    mlp,
    plain,
    speculators,
    target,
    text,
    write,
    zlab,
)
from slipstream import drafters
from slipstream.budget import Budget
from slipstream.drafters.base import Hidden, Seen
from slipstream.errors import DrafterError
from slipstream.heads import checkpoint as head_files
from slipstream.heads import export_head, load_head, save_head
from slipstream.heads.blocks import Blocks
from slipstream.request import Request
from slipstream.sampling import Sampling
from slipstream.targets import open_target
from slipstream.targets.base import Want
from trees import dynamic_tree, spelled

pytestmark = pytest.mark.slow

DEPTHS = 6
NEAR = 1e-4


def shown(target, layers):
    """What a target shows a drafter that reads the text: {layer: (LENGTH, H)}."""
    (scores,) = target.prefill(target.open(), text()[0].tolist(), Want(layers=layers))
    return scores.hidden


def says(head, guess, end, path):
    """(V,) the probabilities that the reference gives what follows text[:end], its root and a path."""
    tokens, hidden = text()
    logits = guess(hidden, np.array([*tokens[: end + 1].tolist(), *path]), end - 1, len(path))
    p = np.exp(logits - logits.max())
    every = np.zeros(V)
    every[np.arange(V) if head.draft_ids is None else head.draft_ids.numpy()] = p / p.sum()
    return every


@torch.no_grad()
def drafts_as(guess, folder, **options):
    """Guesses along the text, and trees behind it: the text comes in two pieces, as a prompt and an accepted path."""
    head, opened = load_head(folder, target()), open_target(target())
    (tokens, hidden), layers = text(), head.layers(LAYERS)
    seen = shown(opened, layers)
    states = head.join(seen)[None]
    first = head.config.block - 1 if head.kind == "falcon" else 0  # a block needs as many states as it has places
    for k, prediction in enumerate(head.predict(states, tokens[None], min(DEPTHS, head.reach or DEPTHS))):
        for i in (first, 3, LENGTH - 2 - k):
            expected = guess(hidden, tokens.numpy(), i, k)
            said = prediction.logits[0, i].numpy()
            np.testing.assert_allclose(said, expected, rtol=0, atol=NEAR * np.abs(expected).max())
    if head.kind not in ("eagle", "eagle3", "falcon", "dflash"):
        return head
    after = cache(partial(says, head, guess))  # small trees are parts of large ones
    for width, nodes in ((1, DEPTHS), (3, 14)):
        sizes = {"width": width, "depth": DEPTHS, "nodes": nodes}
        drafter = drafters.make(head.kind, opened, drafter_path=folder, **sizes, **options)
        session = drafter.begin(Request([1], 10))
        for start, end in ((0, 15), (15, 19)):
            piece = Hidden({layer: states[start:end] for layer, states in seen.items()})
            session.observe(Seen(tokens[start:end].tolist(), start, piece))
            tree = session.propose(int(tokens[end]), Budget(100, 100)).tree
            expected = dynamic_tree(partial(after, end), width, DEPTHS, nodes)
            assert spelled(tree) == pytest.approx(expected, rel=1e-3, abs=NEAR)
    return head


# ---- heads that guess in blocks


def deepspec(**more):
    """A config of DeepSpec's layout, for two layers and blocks of 6."""
    about = {"mask_token_id": 9, "target_layer_ids": [-1, 2, 4], "markov_rank": 0, "enable_confidence_head": False}
    config = {"architectures": ["Qwen3DSparkModel"], "num_target_layers": LAYERS, "num_hidden_layers": 2}
    return llama_config(**config, block_size=6, **about, **more)


def spoken(kind, **more):
    """A config of speculators' layout, for two layers and blocks of 7."""
    about = {"mask_token_id": 9, "aux_hidden_state_layer_ids": [2, 5], "block_size": 7, "draft_vocab_size": DRAFTS}
    return speculators({"num_hidden_layers": 2}, speculators_model_type=kind, **about) | more


def test_dflash_of_zlab(tmp_path):
    guess, _ = dflash(tmp_path, zlab(), (2, 5), 7)
    head = drafts_as(guess, tmp_path)
    assert head.borrowed == {"embed_tokens.weight", "lm_head.weight"}


def test_where_config_json_does_not_name_them_dflash_reads_evenly_spaced_states(tmp_path):
    guess, _ = dflash(tmp_path, zlab() | {"dflash_config": {"mask_token_id": 9}}, (2, 5), 7)
    drafts_as(guess, tmp_path)


@pytest.mark.parametrize("form", ["none", "vanilla", "gated", "rnn"])
def test_dflash_and_dspark_of_deepspec(form, tmp_path):
    """A confidence is told beside the probabilities: here it is left out."""
    rank, sure = (0, None) if form == "none" else (5, form != "gated")
    parts = {"markov_rank": rank, "markov_head_type": form, "enable_confidence_head": sure is not None}
    config = deepspec() | parts | {"confidence_head_with_markov": bool(sure)}
    options = {"rank": rank, "form": form, "sure": sure, "anchor": True, "own": True}
    guess, accepted = dflash(tmp_path, config, (0, 3, 5), 6, **options)
    head = drafts_as(guess, tmp_path, confidence=False)
    if sure is None:
        return
    tokens, hidden = text()
    blocks = Blocks(LENGTH, 6)
    with torch.no_grad():
        states = head.join({layer: torch.tensor(hidden[layer])[None] for layer in head.layers(LAYERS)})
        said = head.sure(head.hidden_blocks(states, tokens[None], blocks), blocks.following(tokens[None]))[0]
    for i, k in ((0, 0), (7, 5), (11, 3)):
        assert said[i, k].item() == pytest.approx(accepted(hidden, tokens.numpy(), i, k), abs=NEAR)
    # Where it is believed, a node is as probable as the head says, times how often it is right.
    seen = Hidden({layer: torch.tensor(hidden[layer][:9]) for layer in head.layers(LAYERS)})
    trees = []
    for believed in (False, True):
        options = {"drafter_path": tmp_path, "width": 1, "depth": 3, "confidence": believed}
        session = drafters.make("dflash", open_target(target()), **options).begin(Request([1], 10))
        session.observe(Seen(tokens[:9].tolist(), 0, seen))
        trees.append(session.propose(int(tokens[9]), Budget(9, 9)).tree)
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    path = np.array([*tokens[:9].tolist(), *trees[0].tokens.tolist()])
    for k in range(3):
        share = 1 / (1 + np.exp(-accepted(hidden, path, 8, k)))
        assert trees[1].score[1 + k] == pytest.approx(trees[0].score[1 + k] * share, rel=1e-3)


@pytest.mark.parametrize("anchor", [False, True])
def test_dflash_and_dspark_of_speculators(anchor, tmp_path):
    guess, _ = dflash(tmp_path / "dflash", spoken("dflash"), (2, 5), 7, own=True, ids=True)
    drafts_as(guess, tmp_path / "dflash")
    config = spoken("dspark", sample_from_anchor=anchor, markov_rank=4, enable_confidence_head=False)
    guess, _ = dflash(tmp_path / "dspark", config, (2, 5), 7, anchor=anchor, rank=4, own=True, ids=True)
    drafts_as(guess, tmp_path / "dspark")


@pytest.mark.parametrize(("k", "options"), [(2, {}), (3, {"bias": False, "qkv_bias": True, "own": False})])
def test_falcon_of_the_paper(k, options, tmp_path):
    drafts_as(falcon(tmp_path, k, **options), tmp_path)


# ---- EAGLE-3: what is read, and what is handed on


def test_with_norm_output_the_next_depth_reads_the_normed_state(tmp_path):
    config = speculators(norm_output=True, norm_before_fc=True)
    drafts_as(eagle3(tmp_path, config, prefix="layers.0.", norm_before_fc=True), tmp_path)
    drafts_as(eagle3(tmp_path, plain(norm_output=True)), tmp_path)


@pytest.mark.parametrize(
    ("config", "aux"),
    [
        (plain(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}), (2, 3, 5)),
        (plain(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), (1, 2, 4)),
        (speculators(eagle_aux_hidden_state_layer_ids=[1, 2, 4]), (1, 2, 4)),
        (
            plain(
                eagle_aux_hidden_state_layer_ids=[1, 2, 4],
                eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
            ),
            (1, 2, 4),
        ),
        (plain(eagle_config={"eagle_aux_hidden_state_layer_ids": []}), (2, 3, 4)),
        (speculators(eagle_aux_hidden_state_layer_ids=[]), (2, 3, 4)),
        (speculators(eagle_aux_hidden_state_layer_ids=None), (2, 3, 4)),
    ],
    ids=["nested", "top level", "speculators", "both", "nested and empty", "empty", "none"],
)
def test_the_states_it_reads_are_those_its_config_means(config, aux, tmp_path):
    prefix = "layers.0." if "speculators_model_type" in config else "midlayer."
    drafts_as(eagle3(tmp_path, config, aux, prefix), tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        speculators(eagle_aux_hidden_state_layer_ids=[2, 4, LAYERS]),
        plain(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, LAYERS - 1]}),
    ],
    ids=["speculators", "nested"],
)
def test_the_last_layers_state_is_read_before_the_final_norm(config, tmp_path):
    prefix = "layers.0." if "speculators_model_type" in config else "midlayer."
    drafts_as(eagle3(tmp_path, config, (2, 4, BEFORE), prefix), tmp_path)


WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("form", "layer", "window"),
    [
        ("speculators", WINDOW, 5),
        ("speculators", {**WINDOW, "sliding_window": 3}, 3),  # shorter than a draft
        ("speculators", {**WINDOW, "layer_types": ["full_attention"]}, None),
        ("speculators", {"sliding_window": 5}, None),
        ("eagle3", WINDOW, 5),
        ("eagle", WINDOW, 5),
    ],
)
def test_a_head_sees_no_further_back_than_its_window(form, layer, window, tmp_path):
    if form == "eagle":
        guess = eagle(tmp_path, llama_config(**layer), window=window)
    elif form == "eagle3":
        guess = eagle3(tmp_path, plain(**layer), window=window)
    else:
        guess = eagle3(tmp_path, speculators(layer), prefix="layers.0.", window=window)
    drafts_as(guess, tmp_path)


@pytest.mark.parametrize(
    "layer",
    [
        {"rope_theta": 700.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 700.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 700.0}}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 700.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "layer_types": ["full_attention"],
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
            "layer_types": ["sliding_attention"],
            "sliding_window": 100,
        },
    ],
    ids=["alone", "parameters", "scaling", "one type", "of the full type", "of the sliding type"],
)
def test_rope_theta_is_found_wherever_it_stands(layer, tmp_path):
    drafts_as(eagle3(tmp_path, speculators(layer), prefix="layers.0.", theta=700.0), tmp_path)


# ---- EAGLE-3: forms of it


def test_layers_without_speculators_are_eagle3_by_their_tensors(tmp_path):
    config = plain(eagle_config={"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True})
    assert drafts_as(eagle3(tmp_path, config, prefix="layers.0."), tmp_path).kind == "eagle3"
    config = llama_config(draft_vocab_size=DRAFTS)  # nothing else says what it is
    assert drafts_as(eagle3(tmp_path, config, prefix="layers.0."), tmp_path).kind == "eagle3"


@pytest.mark.parametrize(
    ("names", "config"),
    [
        (("fc_norm.0", "fc_norm.1", "fc_norm.2"), plain(fc_norm=True, norm_output=True)),
        (("fc_norm.0", "fc_norm.1", "fc_norm.2"), speculators(fc_norm=True, norm_output=True)),
        (("aux_norm_low", "aux_norm_mid", "aux_norm_high"), plain(use_aux_norm=True)),
        (("fc_norm.0", "fc_norm.1", "fc_norm.2"), plain()),  # the file says it
    ],
)
def test_eagle31_norms_each_state_by_itself(names, config, tmp_path):
    prefix = "layers.0." if "speculators_model_type" in config else "midlayer."
    drafts_as(eagle3(tmp_path, config, prefix=prefix, aux_norms=names), tmp_path)


@pytest.mark.parametrize("norm", ["input_layernorm", "hidden_norm"])  # vLLM's name and SGLang's
@pytest.mark.parametrize("window", [None, 5])
def test_a_second_layer_reads_the_first(norm, window, tmp_path):
    layer = {"num_hidden_layers": 2}
    if window:
        layer |= {"sliding_window": window, "layer_types": ["sliding_attention"] * 2}
    config = speculators(layer, norm_output=True)
    drafts_as(eagle3(tmp_path, config, prefix="layers.0.", layers=2, norm=norm, window=window), tmp_path)


def test_three_layers_of_the_published_layout(tmp_path):
    drafts_as(eagle3(tmp_path, plain(num_hidden_layers=3), layers=3), tmp_path)


@pytest.mark.parametrize("layers", [1, 2])
def test_queries_and_keys_may_be_normed_and_projections_have_biases(layers, tmp_path):
    layer = {"num_hidden_layers": layers, "attention_bias": True, "model_type": "qwen3"}
    guess = eagle3(tmp_path, speculators(layer), prefix="layers.0.", qk_norm=True, bias="qkvo", layers=layers)
    drafts_as(guess, tmp_path)


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "mrope", "mrope_section": [2, 2, 2]},
        {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True, "rope_theta": 700.0},
    ],
)
def test_positions_of_pictures_are_those_of_text_on_text(rope, tmp_path):
    config = plain(rope_theta=700.0, rope_scaling=rope)
    drafts_as(eagle3(tmp_path, config, theta=700.0), tmp_path)


@pytest.mark.parametrize("aux", [(3,), (1, 5), (0, 2, 3, 6), (1, 1, 4)])
def test_it_reads_as_many_states_as_its_config_names(aux, tmp_path):
    config = speculators(eagle_aux_hidden_state_layer_ids=list(aux))
    drafts_as(eagle3(tmp_path, config, aux, prefix="layers.0."), tmp_path)


@pytest.mark.parametrize("ids", [True, False])
def test_without_an_output_matrix_it_guesses_through_its_targets(ids, tmp_path):
    config = plain() if ids else {**plain(), "draft_vocab_size": None}
    head = drafts_as(eagle3(tmp_path, config, head=False, ids=ids), tmp_path)
    assert "lm_head.weight" in head.borrowed


# ---- EAGLE-1


def test_an_output_matrix_in_eagle1_is_not_read(tmp_path):
    extra = {"lm_head.weight": torch.randn(V, H)}
    drafts_as(eagle(tmp_path, llama_config(bias=False), extra=extra), tmp_path)


@pytest.mark.parametrize("bias", [True, False])
def test_eagle1_of_speculators(bias, tmp_path):
    config = {
        "speculators_model_type": "eagle",
        "speculators_version": "0.1.0",
        "transformer_layer_config": llama_config(),
        "fusion_bias": bias,
        "layernorms": False,
        "speculators_config": {"algorithm": "eagle", "verifier": {"name_or_path": "x"}},
    }
    head = drafts_as(eagle(tmp_path, config, "transformer.", "fusion_fc", bias, own=False), tmp_path)
    assert (head.kind, head.config.target) == ("eagle", "x")
    write(tmp_path, {**config, "layernorms": True}, {"fusion_fc.weight": torch.zeros(H, 2 * H)})
    with pytest.raises(DrafterError, match="extra norms of `layernorms: true`"):
        load_head(tmp_path)


# ---- Medusa


@pytest.mark.parametrize("form", ["FasterDecoding", "vLLM"])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_medusa_heads_may_have_a_prefix(form, prefix, tmp_path):
    drafts_as(medusa(tmp_path, prefix=prefix, vllm=form == "vLLM"), tmp_path)


@pytest.mark.parametrize("shards", [False, True])
def test_medusa_heads_within_a_whole_model(shards, tmp_path, monkeypatch):
    """Whatever belongs to the model is not even read, where the file allows it."""
    guess = medusa(tmp_path, prefix="medusa_head.", beside=target().state_dict(), shards=shards)
    read = []
    monkeypatch.setattr(head_files, "safe_open", watched(head_files.safe_open, read))
    head = drafts_as(guess, tmp_path)
    assert (head.kind, head.config.heads) == ("medusa", 3)
    assert {name.split(".")[0] for name in read} == {"medusa_head"}


def watched(opened, read):
    class Watched:
        def __init__(self, *given, **options):
            self.file = opened(*given, **options)

        def __enter__(self):
            self.inside = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def keys(self):
            return self.inside.keys()

        def get_tensor(self, name):
            read.append(name)
            return self.inside.get_tensor(name)

    return Watched


def test_medusa_heads_without_output_matrices_guess_through_the_targets(tmp_path):
    head = drafts_as(medusa(tmp_path, outputs=0), tmp_path)
    assert len(head.borrowed) == 3
    with pytest.raises(DrafterError, match="how large the vocabulary is: name its target"):
        load_head(tmp_path)


def test_medusa_heads_may_share_one_output_matrix(tmp_path):
    drafts_as(medusa(tmp_path, vllm=True, outputs=1, config={"original_lm_head": True}), tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test_medusa_heads_may_guess_among_a_map_of_tokens(whole, tmp_path):
    """vLLM's token_map: matrices have a row for each of its tokens, or for all tokens."""
    ids = torch.tensor([40, 3, 12, 63, 9])
    config = {"vocab_size": V, "truncated_vocab_size": 5}
    guess = medusa(tmp_path, vllm=True, ids=ids, whole=whole, config=config)
    head = drafts_as(guess, tmp_path)
    assert head.draft_ids.tolist() == ids.tolist()
    trees_of_medusa(tmp_path, guess, head)
    save_head(head, tmp_path / "ours")
    export_head(head, tmp_path / "published")
    for form in ("ours", "published"):
        drafts_as(guess, tmp_path / form)


@torch.no_grad()
def trees_of_medusa(folder, guess, head):
    """What is drafted, best or drawn, are the most probable tokens of each head."""
    opened = open_target(target())
    tokens, _ = text()
    seen = shown(opened, (LAYERS,))
    for mode in ("best", "sample"):
        drafter = drafters.make("medusa", opened, drafter_path=folder, tree=[[0], [1], [0, 0], [0, 0, 2]], mode=mode)
        drafter.first = 3
        session = drafter.begin(Request([1], 10, sampling=Sampling(temperature=1.0)))
        session.observe(Seen(tokens[:15].tolist(), 0, Hidden({LAYERS: seen[LAYERS][:15]})))
        proposal = session.propose(int(tokens[15]), Budget(100, 100))
        order = [np.argsort(-says(head, guess, 15, [0] * k)) for k in range(3)]
        assert list(proposal.first) == order[0][:3].tolist()
        if mode == "best":
            first, second, third = order[0][0], order[1][0], order[2][2]
            assert list(spelled(proposal.tree)) == [(first,), (order[0][1],), (first, second), (first, second, third)]
        for path, p in spelled(proposal.tree).items():
            assert says(head, guess, 15, [0] * (len(path) - 1))[path[-1]] == pytest.approx(p, rel=1e-4)


def test_weights_are_found_beside_what_a_trainer_leaves(tmp_path):
    guess = medusa(tmp_path)
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "notes.bin"):
        (tmp_path / name).write_bytes(b"not weights")
    drafts_as(guess, tmp_path)
    (tmp_path / "medusa_lm_head.pt").rename(tmp_path / "heads.pt")
    with pytest.raises(DrafterError, match=r"several \(heads\.pt, notes\.bin\)"):
        load_head(tmp_path, target())
    (tmp_path / "notes.bin").unlink()
    drafts_as(guess, tmp_path)


# ---- MLP Speculator


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("inner", [24, None])
@pytest.mark.parametrize("tied", [True, False])
def test_an_mlp_speculator_without_prefix_or_inner_size(bare, inner, tied, tmp_path):
    drafts_as(mlp(tmp_path, bare=bare, inner=inner, tied=tied), tmp_path)


@pytest.mark.parametrize("kept", [(2, 2, 2, 2), (1, 2, 0, 2)])
def test_of_tied_tensors_a_file_may_keep_any_name(kept, tmp_path):
    drafts_as(mlp(tmp_path, tied=True, kept=kept), tmp_path)
