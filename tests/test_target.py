"""Trees against one full forward per path, on every architecture we claim."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from families import FAMILIES, STATEFUL, VOCABULARY, tiny_model
from kinds import of_each_kind
from slipstream.errors import ModelError
from slipstream.sampling import Sampler, Sampling
from slipstream.targets import Want, open_target
from slipstream.targets.cache import KeyValuePool, LayerShape
from slipstream.targets.choose import PROVEN, scores_trees, tells_windows
from slipstream.targets.masks import MaskKind, additive_masks, mask_kinds
from slipstream.tree import TokenTree

TREES = [
    TokenTree.from_continuations(20, [[5, 6, 7, 8], [5, 6, 9, 1], [5, 30, 31], [40, 41, 42, 43], [40, 6]]),
    TokenTree.root(33),
    TokenTree.chain(7, [8, 9, 10]),
]
TEXTS = [list(range(3, 20)), [50], list(range(60, 20, -1))]

GREEDY = Sampler(Sampling(), [])


def paths_alone(model, text, tree):
    """(n, V): for each node, the last row of a forward over the text and its path."""
    rows = []
    for node in range(len(tree)):
        ids = torch.tensor([text + tree.tokens[tree.path_to(node)].tolist()])
        with torch.no_grad():
            rows.append(model(input_ids=ids).logits[0, -1])
    return torch.stack(rows)


def read(target, text, want=None):
    slot = target.open()
    for scores in target.prefill(slot, text, want or Want()):
        last = scores
    return slot, last


def close(a, b, tolerance=1e-4):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def rows(scores, tree):
    return torch.stack([scores.logits(i) for i in range(len(tree))])


def test_every_proven_type_is_tested():
    assert {f.partition("-")[0] for f in FAMILIES} == PROVEN


@pytest.mark.parametrize("family", of_each_kind(FAMILIES))
def test_a_tree_scores_as_its_paths_alone(family, tiny):
    model = tiny(family)
    target = open_target(model, chunk=8)
    slots = [read(target, text)[0] for text in TEXTS]
    for scores, text, tree in zip(target.score(slots, TREES, Want()), TEXTS, TREES, strict=True):
        close(rows(scores, tree), paths_alone(model, text, tree))
    assert scores_trees(target)  # the probe that judges unknown models agrees


def test_a_full_device_says_nothing_about_a_model(tiny, monkeypatch):
    """Else it would be taken for one that gives other logits."""
    target = open_target(tiny("llama"))

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(target, "score", full)
    with pytest.raises(torch.OutOfMemoryError):
        scores_trees(target)


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom", "gpt_oss"])
def test_committed_paths_become_text(family, tiny):
    model = tiny(family)
    target = open_target(model)
    slots = [read(target, text)[0] for text in TEXTS]
    target.score(slots, TREES, Want())
    paths = [TREES[0].path_to(7), [0], [0, 1]]
    for slot, path in zip(slots, paths, strict=True):
        target.commit(slot, path)
    texts = [t + TREES[i].tokens[paths[i]].tolist() for i, t in enumerate(TEXTS)]
    assert [s.tokens for s in slots] == texts
    again = [TREES[2], TREES[0], TREES[1]]
    for scores, text, tree in zip(target.score(slots, again, Want()), texts, again, strict=True):
        close(rows(scores, tree), paths_alone(model, text, tree))


def test_prefill_gives_the_last_row_whatever_the_chunk(tiny):
    model = tiny("llama")
    for chunk in (1, 5, 512):
        _, last = read(open_target(model, chunk=chunk), TEXTS[0])
        close(last.logits(0), paths_alone(model, TEXTS[0][:-1], TokenTree.root(TEXTS[0][-1]))[0])


def test_a_tree_can_grow_level_by_level(tiny):
    model = tiny("llama")
    target = open_target(model)
    slot, _ = read(target, TEXTS[0])
    small = TokenTree.build([20, 5, 40], [-1, 0, 0])
    large = TokenTree.build([20, 5, 40, 6, 7, 8], [-1, 0, 0, 1, 2, 2])
    target.score([slot], [small], Want())
    (scores,) = target.score([slot], [large], Want(), known=3)
    expected = paths_alone(model, TEXTS[0], large)
    close(torch.stack([scores.logits(i) for i in (3, 4, 5)]), expected[3:])


def test_trees_of_several_texts_grow_together(tiny, monkeypatch):
    """In one forward where as many nodes are known and rows are neighbours; each as if it were alone."""
    model = tiny("llama")
    target = open_target(model)
    texts = [*TEXTS, [9, 9, 9], [1, 2]]
    slots = [read(target, text)[0] for text in texts]
    target.close(slots.pop(1))
    del texts[1]  # rows 0, 2, 3 and 4 are left
    small = [TokenTree.chain(20, [5]), TokenTree.root(20), TokenTree.chain(20, [5]), TokenTree.root(20)]
    large = [TREES[0], TokenTree.chain(20, [8, 9])] * 2
    batches, forward = [], target._forward
    monkeypatch.setattr(target, "_forward", lambda s, *more: batches.append([x.row for x in s]) or forward(s, *more))
    order = [2, 0, 3, 1]
    for trees, known in ((small, [0] * 4), (large, [2, 1, 2, 1])):
        given = [[each[i] for i in order] for each in (slots, trees, known)]
        for i, scores in zip(order, target.extend(*given, Want()), strict=True):
            found = torch.stack([scores.logits(node) for node in range(known[i], len(trees[i]))])
            close(found, paths_alone(model, texts[i], trees[i])[known[i] :])
    assert batches == [[0], [2, 3, 4], [2], [4], [0], [3]]
    assert [slot.row for slot in slots] == [0, 2, 3, 4]  # nobody moved


def test_a_batch_changes_its_members(tiny):
    """Slots come and go, rows move, and nobody's text changes."""
    model = tiny("llama")
    target = open_target(model)
    slots = [read(target, text)[0] for text in [*TEXTS, [9, 9, 9], [1, 2]]]
    target.close(slots[1])
    chosen = [slots[4], slots[0], slots[3]]
    texts = [[1, 2], TEXTS[0], [9, 9, 9]]
    for scores, text, tree in zip(target.score(chosen, TREES, Want()), texts, TREES, strict=True):
        close(rows(scores, tree), paths_alone(model, text, tree))
    target.commit(chosen[0], [0, 1])
    other = read(target, [4, 5, 6])[0]
    chosen = [other, slots[2], slots[4]]
    texts = [[4, 5, 6], TEXTS[2], [1, 2, *TREES[0].tokens[:2].tolist()]]
    for scores, text, tree in zip(target.score(chosen, TREES, Want()), texts, TREES, strict=True):
        close(rows(scores, tree), paths_alone(model, text, tree))


SCATTERED = TREES[0].path_to(7)  # nodes that lie apart


@pytest.mark.parametrize("left", [True, False], ids=["to a free row", "in another's place"])
def test_a_row_moves_with_a_path_that_is_not_yet_carried_out(left, tiny):
    model = tiny("llama")
    target = open_target(model)
    slots = [read(target, text)[0] for text in TEXTS]
    target.score(slots, [TREES[0]] * 3, Want())
    for slot in slots:
        target.commit(slot, SCATTERED)
    if left:
        target.close(slots[1])
    for chosen in ([slots[0], slots[2]], [slots[0 if left else 1], slots[2]]):
        for scores, slot in zip(target.score(chosen, [TREES[2]] * 2, Want()), chosen, strict=True):
            close(rows(scores, TREES[2]), paths_alone(model, slot.tokens, TREES[2]))


def test_a_path_that_is_not_yet_carried_out_is_forked_and_cut(tiny):
    model = tiny("llama")
    target = open_target(model)
    slots = [read(target, text)[0] for text in (TEXTS[0], TEXTS[2])]
    target.score(slots, [TREES[0]] * 2, Want())
    for slot in slots:
        target.commit(slot, SCATTERED)
    slots.append(target.fork(slots[0]))
    target.truncate(slots[1], len(TEXTS[2]) + 2)
    texts = [text + TREES[0].tokens[SCATTERED].tolist() for text in (TEXTS[0], TEXTS[2], TEXTS[0])]
    texts[1] = texts[1][: len(TEXTS[2]) + 2]
    for scores, slot, text in zip(target.score(slots, [TREES[2]] * 3, Want()), slots, texts, strict=True):
        assert slot.tokens == text
        close(rows(scores, TREES[2]), paths_alone(model, text, TREES[2]))


@torch.inference_mode()
def test_a_cache_that_grows_keeps_every_key():
    pool = KeyValuePool([LayerShape(1, 1, 1, torch.float32, torch.device("cpu"))], longest=600)
    pool.reserve(2, 10)
    rows, capacity = pool.rows, pool.capacity
    for store in next(iter(pool.stores())):
        store[0, :, 0, :, 0] = torch.arange(1, 1 + rows * capacity).view(rows, capacity)
    pool.reserve(rows + 1, capacity + 1)
    for store in next(iter(pool.stores())):
        assert store[0, :rows, 0, :capacity, 0].flatten().tolist() == list(range(1, 1 + rows * capacity))


@torch.inference_mode()
def test_keys_move_over_one_another():
    pool = KeyValuePool([LayerShape(1, 1, 1, torch.float32, torch.device("cpu"))], longest=16)
    pool.reserve(2, 10)
    for store in next(iter(pool.stores())):
        store[0, :, 0, :, 0] = torch.arange(pool.capacity)
    pool.move(1, 3, [0, 2, 3, 4, 6])
    for store in next(iter(pool.stores())):
        assert store[0, 1, 0, :10, 0].tolist() == [0, 1, 2, 3, 5, 6, 7, 9, 8, 9]
        assert store[0, 0, 0, :10, 0].tolist() == list(range(10))


@pytest.mark.parametrize("family", ["llama", "falcon-alibi", "qwen3_next"])
def test_fork_and_truncate(family, tiny):
    model = tiny(family)
    target = open_target(model)
    slot, _ = read(target, TEXTS[0])
    tree = TREES[2] if target.chains else TREES[1]
    target.score([slot], [tree], Want())
    target.commit(slot, list(range(len(tree))))
    twin = target.fork(slot)
    target.truncate(twin, 5)
    (old,), (new,) = target.score([slot], [tree], Want()), target.score([twin], [tree], Want())
    close(rows(new, tree), paths_alone(model, TEXTS[0][:5], tree))
    close(rows(old, tree), paths_alone(model, TEXTS[0] + tree.tokens.tolist(), tree))


@pytest.mark.parametrize(("family", "cut"), [("llama", True), ("falcon-alibi", True), ("qwen3_next", False)])
def test_a_target_says_what_it_can_cut_without_reading_it_again(family, cut, tiny):
    target = open_target(tiny(family))
    slot, _ = read(target, TEXTS[0])
    assert target.cuts(slot, len(TEXTS[0]))
    assert target.cuts(slot, 5) == cut


def test_a_forked_prompt_is_read_in_chunks_again_where_nothing_can_be_rolled_back(tiny):
    model = tiny("qwen3_next")
    target = open_target(model, chunk=8)
    text = TEXTS[2]  # 40 tokens
    slot, _ = read(target, text)
    twin = target.fork(slot)
    target.truncate(twin, len(text) - 1)
    pieces = []
    watch = model.register_forward_pre_hook(
        lambda _, __, kwargs: pieces.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        (last,) = target.prefill(twin, text[-1:], Want(layers=(2,)))
    finally:
        watch.remove()
    assert sum(pieces) == len(text)
    assert max(pieces) <= 8
    assert last.hidden[2].shape[0] == 1
    close(last.logits(0), paths_alone(model, text[:-1], TokenTree.root(text[-1]))[0])


@pytest.mark.parametrize("family", ["falcon-alibi", "qwen3_next"])
@pytest.mark.parametrize("within", ["reading", "scoring"])
def test_a_state_that_was_interrupted_is_read_again(family, within, tiny):
    """Some layers have read the tokens already, others have not."""
    model, text = tiny(family), TEXTS[0]
    target = open_target(model)
    slot, _ = read(target, text)
    norms = [module for module in model.modules() if "Norm" in type(module).__name__]

    def interrupt(*_):
        raise KeyboardInterrupt

    stop = norms[-1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(target.prefill(slot, [7, 8], Want()) if within == "reading" else target.score([slot], [TREES[2]], Want()))
    stop.remove()
    target.truncate(slot, len(text))
    assert slot.tokens == text
    (scores,) = target.score([slot], [TREES[2]], Want())
    close(rows(scores, TREES[2]), paths_alone(model, text, TREES[2]))


@pytest.mark.parametrize("family", ["falcon-alibi", "qwen3_next"])
def test_after_a_batch_that_failed_each_is_scored_as_if_it_had_not_been(family, tiny, monkeypatch):
    """The first state has read its root by then, in place."""
    model, root = tiny(family), TREES[1]
    target = open_target(model)
    slots = [read(target, text)[0] for text in TEXTS[:2]]
    read_on, calls = type(target)._read, []

    def failing(self, *given, **more):
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError("none left")
        return read_on(self, *given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(type(target), "_read", failing)
        with pytest.raises(MemoryError):
            target.score(slots, [root] * 2, Want())
    for slot, text in zip(slots, TEXTS, strict=False):
        (scores,) = target.score([slot], [root], Want())
        close(rows(scores, root), paths_alone(model, text, root))


def test_a_sequence_that_there_is_no_room_for_disturbs_no_other(tiny, monkeypatch):
    model = tiny("llama")
    target = open_target(model)
    slot, _ = read(target, TEXTS[0])
    reserve = KeyValuePool.reserve

    def small(self, rows, width):
        if rows > 1:
            raise ModelError("the cache does not fit")
        reserve(self, rows, width)

    monkeypatch.setattr(KeyValuePool, "reserve", small)
    for _ in range(2):
        with pytest.raises(ModelError):
            target.open()
    (scores,) = target.score([slot], [TREES[1]], Want())
    close(rows(scores, TREES[1]), paths_alone(model, TEXTS[0], TREES[1]))


def test_a_row_looks_as_far_back_as_its_layer_does():
    """Six positions: what rows 3, 4 and 5 may read of them, if they may read all before them."""
    see, query, key = np.tri(6, dtype=bool)[None, 3:], np.array([[3, 4, 5]]), np.arange(6)[None]
    kinds = {"full": MaskKind(), "sliding": MaskKind(window=2), "chunked": MaskKind(chunk=4)}
    masks = additive_masks(kinds, see, query, key, torch.float32, torch.device("cpu"))
    assert {name: (mask[0, 0] == 0).int().tolist() for name, mask in masks.items()} == {
        "full": [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]],
        "sliding": [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]],
        "chunked": [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]],
    }


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({}, {"full_attention": MaskKind()}),
        ({"sliding_window": 6}, {"sliding_attention": MaskKind(window=6)}),
        ({"sliding_window": 6, "use_sliding_window": True}, {"sliding_attention": MaskKind(window=6)}),
        ({"sliding_window": 6, "use_sliding_window": False}, {"full_attention": MaskKind()}),
        (
            {"layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": 8},
            {"chunked_attention": MaskKind(chunk=8), "full_attention": MaskKind()},
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, None),
    ],
    ids=["plain", "window", "window on", "window off", "chunks", "states"],
)
def test_masks_are_those_that_a_config_names(config, kinds):
    assert mask_kinds(SimpleNamespace(**config)) == kinds


@pytest.mark.parametrize("family", of_each_kind(FAMILIES))
def test_families_tell_their_attention_what_their_masks_say(family, tiny):
    """As captured steps need, which have no masks."""
    config = tiny(family).config.get_text_config()
    if (kinds := mask_kinds(config)) is not None:
        assert tells_windows(tiny(family), kinds)


def test_a_window_that_only_a_mask_has_is_noticed_however_long_it_is():
    layers = ["sliding_attention"] * tiny_model("qwen2_moe").config.num_hidden_layers
    model = tiny_model("qwen2_moe", use_sliding_window=True, sliding_window=4096, layer_types=layers)
    kinds = mask_kinds(model.config)
    assert {kind.window for kind in kinds.values()} == {4096}
    assert not tells_windows(model, kinds)
    assert not tells_windows(model, {"chunked_attention": MaskKind(chunk=64)})


def test_where_attention_depends_on_a_key_s_place_chains_are_scored():
    """Not known to the trial, whose texts are short."""
    model = tiny_model("llama")
    assert open_target(model).trees
    model.config.attn_temperature_tuning = True
    target = open_target(model)
    assert not target.trees
    assert "temperature" in target.notes[0]


def test_hidden_states_are_those_of_the_path(tiny):
    model = tiny("llama")
    target = open_target(model)
    want = Want(layers=(0, 2, 3))
    slot, last = read(target, TEXTS[0], want)
    (scores,) = target.score([slot], [TREES[0]], want)
    with torch.no_grad():
        ids = TEXTS[0] + TREES[0].tokens[TREES[0].path_to(5)].tolist()
        whole = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer in want.layers:
        close(scores.hidden[layer][5], whole[layer][0, -1])
        close(last.hidden[layer], whole[layer][0, : len(TEXTS[0])])


def test_the_best_tokens_come_with_the_forward(tiny):
    target = open_target(tiny("llama"))
    slot, _ = read(target, TEXTS[0])
    (scores,) = target.score([slot], [TREES[0]], Want(samplers=(GREEDY,)))
    expected = paths_alone(tiny("llama"), TEXTS[0], TREES[0]).argmax(-1)
    assert [scores.token(i, GREEDY) for i in range(len(TREES[0]))] == expected.tolist()


def test_bfloat16_stays_close_and_does_not_claim_to_be_exact():
    model = tiny_model("llama", dtype=torch.bfloat16)
    target = open_target(model)
    slot, _ = read(target, TEXTS[0])
    (scores,) = target.score([slot], [TREES[0]], Want())
    close(rows(scores, TREES[0]), paths_alone(model, TEXTS[0], TREES[0]), tolerance=0.3)
    assert not target.exact


@pytest.mark.parametrize("family", STATEFUL)
def test_models_that_cannot_branch_score_chains_and_say_so(family, tiny):
    model = tiny(family)
    target = open_target(model)
    assert not target.trees
    assert type(model).__name__ in target.notes[0]
    chain = TREES[2] if target.chains else TokenTree.root(7)
    slot, last = read(target, TEXTS[0])
    close(last.logits(0), paths_alone(model, TEXTS[0][:-1], TokenTree.root(TEXTS[0][-1]))[0])
    text = list(TEXTS[0])
    for kept in (1, len(chain), 1, 1):  # rejected, accepted whole, rejected twice
        (scores,) = target.score([slot], [chain], Want())
        close(rows(scores, chain), paths_alone(model, text, chain))
        target.commit(slot, list(range(kept)))
        text += chain.tokens[:kept].tolist()


def test_the_cache_grows_and_keeps_its_text(tiny):
    model = tiny("llama")
    target = open_target(model)
    short, _ = read(target, TEXTS[0])
    long, _ = read(target, np.random.default_rng(0).integers(3, VOCABULARY, 250).tolist())
    for scores, slot in zip(target.score([long, short], [TREES[1]] * 2, Want()), (long, short), strict=True):
        close(rows(scores, TREES[1]), paths_alone(model, slot.tokens, TREES[1]))


def test_peft_adapters_count(tiny):
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    model = get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora" in name:
                weight.normal_(0, 0.3)
    target = open_target(model)
    slot, _ = read(target, TEXTS[0])
    (scores,) = target.score([slot], [TREES[0]], Want())
    close(rows(scores, TREES[0]), paths_alone(model, TEXTS[0], TREES[0]))
    assert not torch.allclose(scores.logits(0), paths_alone(tiny("llama"), TEXTS[0], TREES[0])[0], atol=0.1)

    prompted = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ModelError, match="PROMPT_TUNING"):
        open_target(get_peft_model(tiny_model("llama"), prompted))


def test_quantised_models_work(monkeypatch):
    monkeypatch.setattr(torch.backends.quantized, "engine", "onednn")  # the default one knows x86 alone
    model = tiny_model("llama")
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    target = open_target(quantised)
    slot, _ = read(target, TEXTS[0])
    (scores,) = target.score([slot], [TREES[0]], Want())
    alone = paths_alone(quantised, TEXTS[0], TREES[0])
    # int8 activations are scaled per call, so a row depends on its neighbours: close, never equal
    assert (rows(scores, TREES[0]) - alone).abs().mean() < 0.1 * alone.std()
    assert not target.exact


def test_a_device_map_works(tmp_path, tiny):
    from transformers import AutoModelForCausalLM

    tiny("llama").save_pretrained(tmp_path / "m")
    layers = {f"model.layers.{i}": "cpu" if i == 0 else "disk" for i in range(3)}
    places = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
        **layers,
    }
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", device_map=places, offload_folder=str(tmp_path / "off"), dtype=torch.float32
    )
    target = open_target(model)
    slot, _ = read(target, TEXTS[0])
    (scores,) = target.score([slot], [TREES[0]], Want())
    close(rows(scores, TREES[0]), paths_alone(tiny("llama"), TEXTS[0], TREES[0]))


def test_unsuitable_models_are_refused_by_name(tiny):
    from transformers import LlamaModel, T5Config, T5ForConditionalGeneration

    t5 = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))
    with pytest.raises(ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        open_target(t5)
    with pytest.raises(ModelError, match="LlamaModel has no language-modelling head"):
        open_target(LlamaModel(tiny("llama").config))
    with pytest.raises(ModelError, match="Linear is not a transformers model"):
        open_target(torch.nn.Linear(2, 2))
    flash = tiny_model("llama")
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match="flash_attention_2"):
        open_target(flash)
