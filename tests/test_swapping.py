"""A better head takes the place of one that drafts while answers are being written: no text changes, nothing is half
swapped."""

import asyncio
import copy
import itertools

import pytest
import torch

from families import graphs, tiny_model
from slipstream import LLM, DrafterError
from slipstream.drafters import make
from slipstream.heads import HEADS, load_head, registry, save_head
from slipstream.training.loop import pause
from test_service import PROMPTS, Listener

LONG = {"max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=4)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def head(model, seed=0, kind="eagle3", **sizes):
    if kind == "eagle3":
        sizes = {"draft_ids": torch.arange(seed % 3, 40 + seed % 3), **sizes}
    return HEADS[kind].fresh(model, seed=seed, **sizes)


def folder_of(model, path, seed=0, **sizes):
    save_head(head(model, seed, **sizes), path)
    return path


def drafts(llm, prompts=PROMPTS[:2]):
    """What was drafted, step by step."""
    seen, drafter = [], llm.engine.drafter
    propose = drafter.propose

    def heard(*asked):
        found = propose(*asked)
        seen.append(found[0].tree.tokens.tolist())
        return found

    drafter.propose = heard
    for prompt in prompts:
        llm.generate(prompt, max_new_tokens=8, ignore_eos=True)
    del drafter.propose
    return seen


@pytest.mark.parametrize(
    "kind", [kind if kind == "eagle" else pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(HEADS)]
)
def test_a_swapped_head_drafts_as_if_it_had_been_there_from_the_start(model, tmp_path, kind):
    """Its ids of tokens, and what was made of its weights, too."""
    for name, seed in (("old", 1), ("new", 2)):
        made, noise = head(model, seed, kind), torch.Generator().manual_seed(seed)
        for p in made.parameters():  # fresh heads of some kinds are alike
            p.data.add_(torch.randn(p.shape, generator=noise), alpha=0.3)
        if kind == "redrafter":
            made.guess_only(range(seed, 40 + seed))
        save_head(made, tmp_path / name)
    with (
        LLM(model, drafter=kind, drafter_path=tmp_path / "new") as fresh,
        LLM(model, drafter=kind, drafter_path=tmp_path / "old") as llm,
    ):
        before, expected = drafts(llm), drafts(fresh)
        parameters = {name: p.data_ptr() for name, p in llm.engine.drafter.head.named_parameters()}
        assert llm.swap_head(tmp_path / "new") == kind
        assert drafts(llm) == expected
        assert before != expected
        # In place: what was captured reads the new weights.
        assert {name: p.data_ptr() for name, p in llm.engine.drafter.head.named_parameters()} == parameters
        assert llm.engine.drafter.folder == tmp_path / "new"


@pytest.mark.slow
@pytest.mark.parametrize("way", [{}, {"temperature": 0.9, "seed": 7}])
def test_texts_that_are_being_written_stay_those_of_plain_decoding(model, tmp_path, way):
    """A service answers five at a time while heads change under it, in another thread."""
    with LLM(model, drafter="none") as plain:
        expected = [plain.generate(p, **LONG, **way).tokens for p in PROMPTS]
    folders = [folder_of(model, tmp_path / str(seed), seed) for seed in range(3)]
    with LLM(model, drafter="eagle3", drafter_path=folders[0]) as llm:
        asked = [Listener(llm.service, llm.request(p, **LONG, **way)) for p in PROMPTS]
        swaps = 0
        for folder in itertools.cycle(folders):
            if all(each.ended.is_set() for each in asked):
                break
            llm.swap_head(folder)
            swaps += 1
        for each in asked:
            each.wait()
        assert [each.tokens for each in asked] == expected
        assert swaps > 2
        assert llm.service.counts.ended == {"length": len(PROMPTS)}


def test_fixed_steps_see_the_new_weights(model):
    """As on a GPU, without capture: what stands in for layers there reads the weights that were copied."""
    from slipstream.engine import Engine
    from slipstream.request import Request

    old, new = (head(model, seed, qkv_bias=True) for seed in (1, 2))
    for made in (old, new):
        for name, p in made.named_parameters():
            if name.endswith("bias"):
                p.data.normal_(generator=torch.Generator().manual_seed(1 if made is old else 2))
    target = graphs(copy.deepcopy(model))
    drafter = make("eagle3", target, None, drafter_path=old)
    engine = Engine(target, drafter)
    from slipstream.targets.captured.modules import StandIns

    stand_ins = StandIns(drafter.head)
    drafter.swap(new.bind(target.model), None)
    x = torch.randn(2, 64)
    with stand_ins.in_place():
        layer = drafter.head.midlayer.self_attn
        found = [layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)]
    its = new.midlayer.self_attn
    for one, other in zip(found, (its.q_proj(x), its.k_proj(x), its.v_proj(x)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    (*_, last) = engine.run([Request([5, 6, 7], max_new_tokens=8)])
    assert len(last.tokens) == 8


def test_another_kind_or_shape_is_refused_and_nothing_changes(model, tmp_path):
    folder = folder_of(model, tmp_path / "old")
    with LLM(model, drafter="eagle3", drafter_path=folder) as llm:
        before = copy.deepcopy(llm.engine.drafter.head.state_dict())
        save_head(head(model, kind="redrafter"), tmp_path / "other")
        save_head(head(model, 5, intermediate_size=64), tmp_path / "wide")
        save_head(head(model, 5, draft_ids=torch.arange(30)), tmp_path / "few")
        save_head(head(model, 5, tied=False), tmp_path / "own")
        for name, said in (
            ("other", "kind redrafter can't take the place of another kind: here eagle3 drafts"),
            ("wide", "intermediate_size is 64, not 48"),
            ("few", "draft_vocab_size is 30, not 40"),
        ):
            with pytest.raises(DrafterError, match=said):
                llm.swap_head(tmp_path / name)
        with pytest.raises(DrafterError, match="no head is called 'medusa' here: there is eagle3"):
            llm.swap_head(folder, "medusa")
        after = llm.engine.drafter.head.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert llm.engine.drafter.folder == folder
    with LLM(model, drafter="suffix") as llm, pytest.raises(DrafterError, match="here none drafts"):
        llm.swap_head(folder)


def test_a_trained_output_matrix_is_another_shape(model, tmp_path):
    with LLM(model, drafter="eagle3", drafter_path=folder_of(model, tmp_path / "tied")) as llm:
        untied = head(model, 5, tied=False)
        with torch.no_grad():
            untied.lm_head.weight.add_(1)
        with pytest.raises(DrafterError, match=r"has its own lm_head\.weight"):
            llm.swap_head(untied)


def queries(head):
    """Weights that two new heads for one model do not share."""
    return head.midlayer.self_attn.q_proj.weight


@pytest.mark.slow
def test_auto_swaps_by_name_and_asks_the_new_one_anew(model, tmp_path):
    folders = [folder_of(model, tmp_path / str(seed), seed) for seed in range(3)]
    with LLM(model, heads=",".join(map(str, folders[:2]))) as llm:
        with pytest.raises(DrafterError, match="several eagle3 heads draft here, eagle3, eagle3-2: say"):
            llm.swap_head(folders[2])
        text = llm.generate(PROMPTS[0], **LONG).tokens
        assert llm.swap_head(folders[2], "eagle3-2") == "eagle3-2"
        parts, new = llm.engine.drafter.parts, load_head(folders[2], model)
        assert torch.equal(queries(parts["eagle3-2"].head), queries(new))
        assert not torch.equal(queries(parts["eagle3"].head), queries(new))
        assert all(not any(group["eagle3-2"].due) for group in llm.engine.drafter.pilot._by_batch.values())
        assert llm.generate(PROMPTS[0], **LONG).tokens == text


@pytest.mark.slow
def test_what_is_registered_instead_is_swapped_in(model, tmp_path):
    """As `tune` does it: the better head is registered, the one it began with is not any more."""
    old, new, wide = (tmp_path / name for name in ("old", "new", "wide"))
    folder_of(model, old, 1)
    registry.add(old, model)
    with LLM(model) as llm:
        assert llm.reload_heads().swapped == {}
        registry.add(folder_of(model, new, 2), model)
        assert llm.reload_heads().swapped == {}  # both are registered, and a new start would ask both
        registry.remove(old)
        found = llm.reload_heads()
        assert (found.swapped, found.refused) == ({"eagle3": str(new)}, {})
        assert torch.equal(queries(llm.engine.drafter.parts["eagle3"].head), queries(load_head(new, model)))
        assert llm.reload_heads().swapped == {}
        registry.add(folder_of(model, wide, 3, intermediate_size=64), model)
        registry.remove(new)
        assert "intermediate_size is 64" in llm.reload_heads().refused["eagle3"]
        assert llm.engine.drafter.parts["eagle3"].folder == new


def test_a_head_that_was_named_gives_way_to_a_newer_one_alone(model, tmp_path):
    known, named, new = (folder_of(model, tmp_path / name, seed) for seed, name in enumerate(("known", "named", "new")))
    registry.add(known, model)
    with LLM(model, drafter="eagle3", drafter_path=named) as llm:
        assert llm.reload_heads().swapped == {}
        registry.remove(known)
        registry.add(new, model)
        assert llm.reload_heads().swapped == {"eagle3": str(new)}
    registry.add(named, model)
    with LLM(model, drafter="eagle3", drafter_path=named) as llm:
        assert llm.reload_heads().swapped == {}  # though the other was registered first


def test_a_server_reloads_heads(model, tmp_path):
    pytest.importorskip("fastapi")
    from slipstream.server.app import Server
    from test_collect import letters

    registry.add(folder_of(model, tmp_path / "old", 1), model)
    with LLM(model, letters()) as llm:
        server = Server(llm, "tiny", key="secret")
        assert any(getattr(route, "path", "") == "/heads/reload" for route in server.app.routes)
        registry.add(folder_of(model, tmp_path / "new", 2), model)
        registry.remove(tmp_path / "old")
        told = asyncio.run(server.backend.find("reload_heads"))
        assert told == {"swapped": {"eagle3": str((tmp_path / "new").resolve())}, "refused": {}}
        server.service.close()


@pytest.mark.parametrize(("share", "expected"), [(1.0, []), (0.5, [2.0]), (0.2, [8.0])])
def test_work_takes_its_share_of_the_time(monkeypatch, share, expected):
    slept = []
    monkeypatch.setattr("slipstream.training.loop.sleep", slept.append)
    pause(2.0, share)
    assert slept == pytest.approx(expected)
