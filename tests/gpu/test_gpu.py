"""The laws on a GPU (`make test-gpu`): texts don't depend on drafts, batch or device, in float32 and in bfloat16, and a
row's logits depend on its own tokens alone, bit for bit."""

import copy
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import slipstream
from behind import compare_drafts
from families import FAMILIES, tiny_model
from oracle import Oracle
from slipstream import LLM, drafters
from slipstream.answers import together
from slipstream.drafters.magicdec import by_block
from slipstream.engine import Engine
from slipstream.errors import ModelError
from slipstream.heads import HEADS
from slipstream.kernels.sizes import PAGE
from slipstream.sampling import Sampler, Sampling
from slipstream.targets import Want, load_model, open_target
from slipstream.targets.captured.arena import Arena
from slipstream.targets.captured.function import Captured
from slipstream.targets.captured.graph_target import ROWS, GraphTarget
from slipstream.training.distill import attempt
from slipstream.training.payoff import measure_pair
from slipstream.tree import TokenTree
from test_head_pages import LONG, SIZES, begin, engine_of, go_on, random_head, retire
from test_magicdec import root_weights
from test_threads import answer, some_request
from trials import trials

if not torch.cuda.is_available():
    pytest.exit("these tests need a CUDA device, and torch sees none", returncode=1)

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [40], [11, 12, 11, 12, 11, 13, 50, 51, 52, 50], [3, 3, 3, 4]]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
PENALISED = {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 3}
WAYS = {"greedy": {}, "sampled": SAMPLED, "penalised": PENALISED}
# Attention with terms of its own: these keep their ordinary forwards, which round differently for other shapes.
OTHERS = {"bloom", "falcon", "gpt_oss"}
EXPERTS = {"qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss"}  # which take rows in groups


def head_for(drafter, model):
    """Options of a drafter that has a head, or heads; else none."""
    name = {"eagle3": "drafter_path", "auto": "heads"}.get(drafter)
    return {} if name is None else {name: random_head("eagle3", model)}


def texts(llm, prompts=PROMPTS, **options):
    return [r.tokens for r in llm.generate(prompts, max_new_tokens=20, **options)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_does_not_depend_on_drafts_or_device(family, tiny):
    here, there = LLM(tiny(family), drafter="none"), LLM(copy.deepcopy(tiny(family)).to("cuda"), drafter="none")
    assert isinstance(there.target, GraphTarget) or family in OTHERS | EXPERTS
    plain = there.engine.drafter
    for options in WAYS.values():
        expected = texts(here, **options)
        there.engine.drafter = plain
        assert texts(there, **options) == expected
        there.engine.drafter = Oracle(there.target, [p + e for p, e in zip(PROMPTS, expected, strict=True)])
        assert texts(there, **options) == expected


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in OTHERS | EXPERTS])
def test_in_bfloat16_too(family, tiny):
    """Alone, in a batch, drafted for, and in a batch that is drafted for."""
    llm = LLM(copy.deepcopy(tiny(family)).to("cuda", torch.bfloat16), drafter="none")
    plain = llm.engine.drafter
    assert llm.target.exact
    assert isinstance(llm.target, GraphTarget)
    for options in WAYS.values():
        llm.engine.drafter = plain
        expected = [texts(llm, [p], **options)[0] for p in PROMPTS]
        assert texts(llm, **options) == expected
        llm.engine.drafter = Oracle(llm.target, [p + e for p, e in zip(PROMPTS, expected, strict=True)])
        assert [texts(llm, [p], **options)[0] for p in PROMPTS] == expected
        assert texts(llm, **options) == expected
    assert all(r.stats.exact for r in llm.generate(PROMPTS, max_new_tokens=4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", drafters.names())
def test_every_drafter_works_there(name, dtype, tiny):
    model = copy.deepcopy(tiny("llama")).to("cuda", dtype)
    plain = LLM(model, drafter="none")
    for trial in trials(name, model):
        llm = LLM(model, drafter=name, **trial)
        for options in ({}, SAMPLED):
            expected = [texts(plain, [p], **options)[0] for p in PROMPTS]
            assert [texts(llm, [p], **options)[0] for p in PROMPTS] == expected
            assert texts(llm, **options) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["redrafter", "medusa", "eagle3", "falcon", "dflash", "auto", "rasd"])
def test_heads_draft_behind_steps_of_several_sequences(kind, dtype, long, monkeypatch):
    """For all together, some of which end before others: what was started is what would be drafted afterwards."""
    model, sizes = long(dtype), compare_drafts(monkeypatch)
    head = random_head("eagle3", model) if kind in ("auto", "rasd") else HEADS[kind].fresh(model)
    llm = LLM(model, drafter=kind, **{"heads" if kind == "auto" else "drafter_path": head})
    lengths, prompts = [30, 200, 60, 45, 30, 75], [*PROMPTS, LONG[:PAGE], LONG[3 : PAGE + 1]]
    for options in ({}, SAMPLED):
        plain = LLM(model, drafter="none").generate(prompts, max_new_tokens=200, ignore_eos=True, **options)
        sizes.clear()
        asked = [
            replace(request, max_new_tokens=count)
            for request, count in zip(llm.requests(prompts, ignore_eos=True, **options), lengths, strict=True)
        ]
        ended = {id(sequence.request): sequence.tokens for sequence in llm.engine.run(asked)}
        assert [ended[id(one)] for one in asked] == [p.tokens[:n] for p, n in zip(plain, lengths, strict=True)]
        assert kind == "auto" or {min(sizes), max(sizes)} == {1, 6}  # whom auto asks depends on the machine


def test_captures_behind_steps_are_few(long, monkeypatch):
    """One for each shape of step and size of batch: they are made once, and none is dropped."""
    model, captures = long(torch.bfloat16), []
    llm = LLM(model, drafter="eagle3", drafter_path=random_head("eagle3", model), max_batch=8)
    prompts, options = [LONG[i : 60 + i] for i in range(8)], {"max_new_tokens": 60, "ignore_eos": True}

    def run():
        return [s.tokens for s in llm.engine.run(llm.requests(prompts, **options)) if s.finish]

    first = run()
    monkeypatch.setattr("slipstream.targets.captured.function.capture", lambda *given: captures.append(given))
    assert run() == first
    assert captures == []
    assert len(llm.engine.drafter.captured_ahead._fetches) <= 24


@pytest.mark.parametrize("drafter", ["none", "pld", "eagle3"])
def test_each_text_of_a_batch_follows_its_own_rules(drafter, long):
    """Greedy, sampled and penalised ones in one step, whose trees have different sizes."""
    model, rules = long(torch.bfloat16), [*WAYS.values(), {"temperature": 1.5, "top_k": 5, "min_p": 0.1, "seed": 5}]
    plain, prompts = LLM(model, drafter="none"), [*PROMPTS, LONG[:PAGE]]
    llm = LLM(model, drafter=drafter, **head_for(drafter, model))
    asked = [(prompt, {**rules[i % 4], "max_new_tokens": 20 + 5 * i}) for i, prompt in enumerate(2 * prompts)]
    requests = [llm.request(prompt, ignore_eos=True, **options) for prompt, options in asked]
    ended = {id(s.request): s.tokens for s in llm.engine.run(list(requests)) if s.finish}
    expected = [plain.generate(prompt, ignore_eos=True, **options).tokens for prompt, options in asked]
    assert [ended[id(request)] for request in requests] == expected


@pytest.mark.parametrize("drafter", ["none", "eagle3", "auto"])
def test_prompts_that_begin_like_others_are_answered_as_those_read_whole(drafter, long):
    """Through the service, after kept texts, some of them with their answers, and beside running ones: so many that
    prompts are read without states for drafters that rest."""
    model, rng = long(torch.bfloat16), random.Random(2)
    plain, llm = LLM(model, drafter="none"), LLM(model, drafter=drafter, max_batch=8, **head_for(drafter, model))
    begun = [[], LONG[:40], LONG[:PAGE], LONG[: PAGE + 20]]
    for _ in range(3):
        prompts = [rng.choice(begun) + rng.choices(range(3, 64), k=rng.randrange(1, 40)) for _ in range(24)]
        options = [{"max_new_tokens": rng.randrange(4, 60), "ignore_eos": True} for _ in prompts]
        found = together(llm.service, [llm.request(p, **o) for p, o in zip(prompts, options, strict=True)])
        expected = [plain.generate(p, **o).tokens for p, o in zip(prompts, options, strict=True)]
        assert [running.tokens for running in found] == expected
        begun += [prompt + said for prompt, said in zip(prompts, expected, strict=True)][::4]
    assert llm.service.counts.found_tokens > 24 * PAGE
    llm.close()


def test_a_trial_of_drafts_says_one_text_and_gives_its_memory_back(tiny):
    model, draft = (copy.deepcopy(m).to("cuda", torch.bfloat16) for m in (tiny("llama"), tiny_model("llama", seed=3)))
    used = []
    for _ in range(2):
        assert measure_pair(model, draft).ratio > 0
        trials = attempt(model, None, {"before": (draft, 2), "after": (draft, 4)}, PROMPTS)
        assert trials
        assert all(trial.same for trial in trials)
        used.append(torch.cuda.memory_allocated())
    assert used[1] - used[0] < 1 << 20


@pytest.mark.parametrize("drafter", ["none", "suffix", "eagle3", "auto"])
def test_threads_get_the_answers_that_one_after_the_other_gets(drafter, tiny):
    """And heads, whose states lie in tensors that every step writes to, keep what they need between their steps."""
    model = copy.deepcopy(tiny("llama")).to("cuda", torch.bfloat16)
    head = {"drafter_path": HEADS["eagle3"].fresh(model)} if drafter == "eagle3" else {}
    llm = LLM(model, drafter=drafter, **head)
    asked = [some_request(random.Random(seed)) for seed in range(80)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda given: answer(llm, *given), asked))
    assert together == [answer(llm, *given) for given in asked]
    assert llm.engine._open == []


def test_the_first_answers_capture_nothing(monkeypatch):
    """Of one sequence, and of two that take turns: what they need is captured before them."""
    llm, captures = slipstream.load(drafter="auto", device="cuda"), []
    assert llm.model.dtype == torch.bfloat16
    for place in ("fixed_step", "function"):
        monkeypatch.setattr(f"slipstream.targets.captured.{place}.capture", lambda *given: captures.append(given))
    streams = [llm.stream(prompt, max_new_tokens=48) for prompt in ("Hello!", "Say this again: " + "so be it, " * 40)]
    for _ in itertools.zip_longest(*streams):
        pass
    assert all(stream.result.tokens for stream in streams)
    assert captures == []


def test_a_capture_writes_into_nobody_elses_memory():
    captured = Captured(lambda table, given: table + given, torch.device("cuda"))
    table, given = torch.tensor([[1, 2, 3]]), torch.ones((1, 3), dtype=torch.long, device="cuda")
    captured.fetch(table, given)
    captured.fetch(table, still=(given,))
    others = [torch.zeros(3, dtype=torch.long, device="cuda") for _ in range(64)]  # small ones fill every gap
    assert captured.fetch(10 * table, given).tolist() == [[11, 21, 31]]
    assert captured.fetch(10 * table, still=(given,)).tolist() == [[11, 21, 31]]
    assert not any(other.any() for other in others)


@pytest.fixture(scope="module", params=[False, True], ids=["captured", "compiled"])
def wide(request):
    """A target of ordinary width, in bfloat16. Layers of the usual form are never compiled: those have another."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12, "num_key_value_heads": 4}
    sizes |= {"hidden_act": "gelu"} if request.param else {}
    config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=8192, max_position_embeddings=8192)
    return open_target(LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval(), compile=request.param, memory=0.02)


def read(target, text):
    slot = target.open()
    for _ in target.prefill(slot, text, Want()):
        pass
    return slot


def some(n, seed):
    return torch.randint(1, 8000, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def differing(target, slots, trees, rows, node, expected):
    """Logits of one node of the first tree that have other bits than expected."""
    scores = target.score(slots, trees, Want(rows=rows))[0]
    return int((scores.logits(node) != expected).sum())


@pytest.mark.parametrize("length", [300, 5000])  # the latter's splits are merged by several programs, 16 at a time
def test_a_row_depends_on_its_path_alone(length, wide):
    if length > 300 and wide.compile:
        pytest.skip("attention is the same, and each shape of step takes long to compile")
    text, path = some(length, 1), some(6, 2)
    slot, others = read(wide, text), [read(wide, some(50 + 30 * i, 10 + i)) for i in range(15)]
    chain = TokenTree.chain(path[0], path[1:])
    expected = wide.score([slot], [chain], Want(rows=8))[0].logits(5).clone()

    # The path on scattered rows among others, at every width; chains of other lengths beside it.
    noise = some(130, 3)
    for n in (16, 32, 64, 128):
        tokens, parents, at = [path[0]], [-1], 0
        for token in path[1:]:
            for _ in range((n - 7) // 5):
                tokens.append(noise[len(tokens)])
                parents.append(len(tokens) // 2 - 1)
            tokens.append(token)
            parents.append(at)
            at = len(tokens) - 1
        assert differing(wide, [slot], [TokenTree.build(tokens, parents)], n, at, expected) == 0
    for rows in ROWS[1:]:
        wide._alike = {(n, False): False for n in ROWS}  # no shortcut: compute as many rows as asked for
        assert differing(wide, [slot], [chain], rows, 5, expected) == 0
    for size in (2, 4, 16):
        trees = [chain, *(TokenTree.chain(noise[i], noise[:i]) for i in range(size - 1))]
        assert differing(wide, [slot, *others[: size - 1]], trees[:size], 16, 5, expected) == 0

    # One token after the other; and when the text was read in other pieces.
    twin = wide.fork(slot)
    for token in path:
        last = wide.score([twin], [TokenTree.root(token)], Want())[0].logits(0).clone()
        wide.commit(twin, [0])
    assert int((last != expected).sum()) == 0
    for pieces in ([1] * 8 + [length - 8], [64] * 4 + [length - 256], [128, length - 128], [length - 1, 1]):
        again = wide.open()
        for start, count in zip(itertools.accumulate([0, *pieces]), pieces, strict=False):
            for _ in wide.prefill(again, text[start : start + count], Want()):
                pass
        assert differing(wide, [again], [chain], 8, 5, expected) == 0
        wide.close(again)
    for s in (slot, twin, *others):
        wide.close(s)
    assert wide.arena.free == wide.arena.pages - 1


def test_a_tree_grows_level_by_level_with_the_same_bits(wide):
    slot, tree = read(wide, some(200, 1)), TokenTree.build(some(8, 2), [-1, 0, 0, 1, 2, 2, 5, 6])
    expected = [row.clone() for row in (wide.score([slot], [tree], Want())[0].logits(i) for i in range(8))]
    for known, end in ((0, 3), (3, 6), (6, 7), (7, 8)):
        part = TokenTree.build(tree.tokens[:end].tolist(), tree.parents[:end].tolist())
        (scores,) = wide.score([slot], [part], Want(), known=known)
        assert all(torch.equal(scores.logits(i), expected[i]) for i in range(known, end))
    wide.close(slot)


@pytest.mark.parametrize("count", [1, 40])
def test_a_step_that_reads_prompts_besides_gives_the_same_bits(count, wide):
    """Each tree's rows, and what is read along: its last row, and what is written after it."""
    free, tree = wide.arena.free, TokenTree.build(some(8, 2), [-1, 0, 0, 1, 2, 2, 5, 6])
    slots, texts = [read(wide, some(150 + i, i)) for i in range(count)], [some(20 + i, 50 + i) for i in range(count)]
    expected = [wide.score([slot], [tree], Want())[0].every().clone() for slot in slots]
    readers, alone = ([read(wide, some(140, 99)) for _ in range(count)] for _ in range(2))
    scored, found = wide.score_and_read(slots, [tree] * count, readers, texts, Want(samplers=()))
    scored = [scores.every().clone() for scores in scored]
    ends = [scores.logits(0).clone() for scores in found]
    assert all(torch.equal(*pair) for pair in zip(scored, expected, strict=True))
    for slot, other, text, end in zip(readers, alone, texts, ends, strict=True):
        (own,) = wide.read([other], [text], Want())
        assert torch.equal(own.logits(0), end)
        after = [wide.score([each], [tree], Want())[0].every().clone() for each in (slot, other)]
        assert torch.equal(*after)
    for slot in (*slots, *readers, *alone):
        wide.close(slot)
    assert wide.arena.free == free


def test_twins_share_pages_until_they_write(wide):
    text, free = some(300, 1), wide.arena.free
    slot = read(wide, text)
    twins = [wide.fork(slot) for _ in range(3)]
    assert free - wide.arena.free == 3  # pages of one text
    tree = TokenTree.build(some(4, 2), [-1, 0, 0, 2])
    rows = [wide.score([s], [tree], Want())[0].logits(3).clone() for s in (*twins, slot)]
    assert all(torch.equal(row, rows[0]) for row in rows)
    wide.commit(twins[0], [0, 2, 3])
    wide.score([twins[0]], [tree], Want())
    assert torch.equal(wide.score([slot], [tree], Want())[0].logits(3), rows[0])
    for s in (*twins, slot):
        wide.close(s)
    assert wide.arena.free == free


def test_asking_what_was_attended_to_keeps_the_bits(wide):
    """Of one sequence, of few and of more; steps that ask stand between others."""
    texts, tree = [some(100 + 173 * i, i) for i in range(12)], TokenTree.build(some(5, 2), [-1, 0, 0, 1, 3])
    slots = [read(wide, text) for text in texts]
    for batch in (1, 3, 12):
        quiet = [s.every().clone() for s in wide.score(slots[:batch], [tree] * batch, Want(rows=8))]
        for _ in range(2):
            for slot in slots[:batch]:
                slot.wants_attention, slot.attended = True, None
            loud = wide.score(slots[:batch], [tree] * batch, Want(rows=8))
            assert all(torch.equal(a.every(), b) for a, b in zip(loud, quiet, strict=True))
        for slot in slots[:batch]:  # every head of every layer has a whole to share out
            assert len(slot.attended) == slot.length // 128 + 1
            assert float(slot.attended.sum()) == pytest.approx(4 * 12, rel=1e-4)
        again = wide.score(slots[:batch], [tree] * batch, Want(rows=8))
        assert all(torch.equal(a.every(), b) for a, b in zip(again, quiet, strict=True))
    for slot in slots:
        wide.close(slot)


@pytest.mark.parametrize("count", [3, 12, 40])
def test_batches_of_long_texts_give_the_same_bits(count, wide, monkeypatch):
    """Steps with few tiles, whose attention has other programs, say what steps with many do; so do drafts at once."""
    texts, tree = [some(600 + 113 * i, i) for i in range(count)], TokenTree.build(some(5, 2), [-1, 0, 0, 1, 3])
    slots, found = [read(wide, text) for text in texts], []
    for length in (1 << 20, 1):
        monkeypatch.setattr("slipstream.targets.captured.graph_target.LONG", length)
        rows = [s.every().clone() for s in wide.score(slots, [tree] * count, Want(rows=8))]
        found.append((rows, wide.draft_chains(slots, [[7, 8]] * count, 3, 8192)))
    (one, chains), (other, same) = found
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert chains == same
    for slot in slots:
        wide.close(slot)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "qwen2-sliding"])
def test_a_verification_tells_what_its_roots_attend_to(family):
    model = tiny_model(family, max_position_embeddings=2048).to("cuda")
    target, tree = open_target(model, memory=0.02), TokenTree.build([4, 5, 6, 7, 8], [-1, 0, 0, 1, 2])
    assert isinstance(target, GraphTarget)
    slots = [read(target, [1 + (17 + j) * i % 60 for i in range(n)]) for j, n in enumerate((900, 255, 40))]
    for some_slots in (slots[:1], slots):
        for slot in some_slots:
            slot.wants_attention = True
        target.score(some_slots, [tree] * len(some_slots), Want(rows=8))
        for slot in some_slots:
            expected = torch.from_numpy(by_block(root_weights(model, [*slot.tokens, 4]).float(), target.block))
            torch.testing.assert_close(slot.attended, expected, rtol=0, atol=2e-3)


def test_drawn_tokens_are_those_of_the_cpu(wide):
    """The same logits, drawn from within the step and by the sampler on the CPU."""
    text, tree = some(200, 5), TokenTree.build(some(16, 6), [max(i - 3, min(0, i - 1)) for i in range(16)])
    slot, different, drawn = read(wide, text), 0, 0
    for seed, options in enumerate([SAMPLED, PENALISED, {"temperature": 1.0}, {"temperature": 1.5, "min_p": 0.02}] * 5):
        sampling = Sampling(**{k: v for k, v in options.items() if k != "seed"})
        sampler = Sampler(sampling, text, seed)
        sampler.push(int(tree.tokens[0]))
        (scores,) = wide.score([slot], [tree], Want(samplers=(sampler,)))
        for node in range(len(tree)):
            alone = Sampler(sampling, text, seed)
            for i in tree.path_to(node):
                alone.push(int(tree.tokens[i]))
            different += scores.token(node, sampler) != alone.sample(scores.logits(node).cpu())
            drawn += 1
    print(f"{different} of {drawn} tokens drawn on the device differ")
    assert different <= drawn // 100
    wide.close(slot)


def test_nothing_leaks(tiny):
    llm = LLM(copy.deepcopy(tiny("llama")).to("cuda", torch.bfloat16), drafter="pld")

    def used(count):
        for i in range(count):
            llm.generate(PROMPTS[i % 4], max_new_tokens=6, **(SAMPLED if i % 2 else {}))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    assert used(100) == used(900)
    assert llm.target.arena.free == llm.target.arena.pages - 1


@pytest.mark.parametrize("drafter", ["auto", "eagle3", "none"])
def test_memory_goes_back_when_an_llm_is_closed(drafter):
    """Again and again in one process, though something still refers to it."""
    before = torch.cuda.memory_allocated()  # by models of other tests
    model, tokenizer = load_model(None, dtype="bfloat16", device="cuda")
    used, closed = [], []
    for _ in range(4):
        with LLM(model, tokenizer, drafter, memory=0.2) as llm:
            llm.generate("Hello!", max_new_tokens=12)
        closed.append(llm)
        used.append(torch.cuda.memory_allocated() - before)
    assert used[-1] - used[0] < 1 << 20
    assert used[0] < 3 * sum(p.nbytes for p in model.parameters())  # no cache is among it


def test_a_cache_that_does_not_fit_says_so():
    sizes = {"hidden_size": 4096, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 32}
    config = LlamaConfig(**sizes, vocab_size=100, max_position_embeddings=1 << 20)
    target = open_target(LlamaForCausalLM(config).to("cuda", torch.bfloat16), memory=0.001)
    slot = read(target, [1, 2, 3])
    with pytest.raises(ModelError, match=r"the cache is full: \d+ more pages .* are in use .* on cuda:0"):
        target.arena.reach(target.open(), target.arena.longest + 1)
    target.score([slot], [TokenTree.root(4)], Want())  # and goes on with what it has


@pytest.fixture(scope="module")
def long():
    """long(dtype) -> a small model of long texts."""
    return cache(lambda dtype: tiny_model("llama", max_position_embeddings=4096).to("cuda", dtype))


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_heads_with_keys_in_pages_draft_as_those_with_rows(dtype, kind, long):
    """The kernel sums in the order of positions, wherever keys lie. Rows of text are read by another one in rows, if a
    head has several layers."""
    if (kind, dtype) == ("two layers", torch.bfloat16):
        pytest.skip("its two ways to read a text round differently")
    model, found = long(dtype), []
    for pages in (True, False):
        engine = engine_of(kind, model, lambda kind: random_head(kind, model), pages=pages)
        assert engine.drafter.fixed
        begun = [begin(engine, LONG[:length], 20, seed=1) for length in (3, PAGE - 4, 2 * PAGE + 50)]
        go_on(engine, *(sequence for sequence, _, _ in begun))
        alone, trees, _ = begin(engine, LONG, 40, seed=2)  # drafts are queued behind its steps
        go_on(engine, alone)
        begun.append((alone, trees, 0))
        found.append([(sequence.tokens, trees) for sequence, trees, _ in begun])
        retire(engine, *(sequence for sequence, _, _ in begun))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "two layers", "dflash"])
@pytest.mark.parametrize("length", [PAGE, 2 * PAGE + 20])
def test_after_a_shared_prefix_heads_draft_as_after_a_text_read_whole(length, kind, long):
    model = long(torch.float32)
    other = [*LONG[:length], *reversed(LONG[:30])]
    engine = engine_of(kind, model, lambda kind: random_head(kind, model))
    alone, expected, _ = begin(engine, other, 30)
    go_on(engine, alone)
    retire(engine, alone)
    first, _, _ = begin(engine, LONG, 40)
    go_on(engine, first, steps=3)
    second, found, known = begin(engine, other, 30, copy_from=first)
    assert known == length - 1
    go_on(engine, first, steps=2)
    go_on(engine, first, second)
    assert found == expected
    retire(engine, first, second)


def test_no_draft_is_captured_again_as_a_text_grows(long, monkeypatch):
    model, captures = long(torch.bfloat16), []
    engine = engine_of("eagle3", model, lambda kind: random_head(kind, model))
    sequence, _, _ = begin(engine, LONG[:20], 3000)
    go_on(engine, sequence, steps=30)
    monkeypatch.setattr("slipstream.targets.captured.function.capture", lambda *given: captures.append(given))
    while sequence.slot.length < 2900:
        go_on(engine, sequence, steps=1)
    assert captures == []
    retire(engine, sequence)


def test_heads_share_the_memory_of_texts(long):
    """They are given to it after steps were captured, which are captured again."""
    model = long(torch.bfloat16)
    plain = LLM(model, drafter="none").generate([LONG[:50]], max_new_tokens=30, ignore_eos=True)[0].tokens
    target = open_target(model, memory=5e-5)
    pages, had = target.arena.pages, target.arena.bytes
    assert target._steps
    drafter = drafters.make("eagle3", target, None, drafter_path=random_head("eagle3", model))
    assert target._steps == {}
    assert target.arena.pages < pages
    assert target.arena.bytes < 1.01 * had
    engine = Engine(target, drafter)
    sequence, _, _ = begin(engine, LONG[:50], 30)
    go_on(engine, sequence)
    assert sequence.tokens == plain
    retire(engine, sequence)


def test_where_pages_are_scarce_texts_and_their_heads_keys_are_put_back(long, monkeypatch):
    model, rng = long(torch.bfloat16), random.Random(1)
    begin_alike = rng.choices(range(3, 64), k=200)
    asked = [begin_alike[: rng.choice([0, 130, 150])] + rng.choices(range(3, 64), k=30) for _ in range(12)]
    plain = LLM(model, drafter="none").generate(asked, max_new_tokens=40, ignore_eos=True)
    monkeypatch.setattr(Arena, "_fitting", lambda *_: 8)
    llm = LLM(model, drafter="eagle3", drafter_path=random_head("eagle3", model), max_batch=8)
    found = llm.generate(asked, max_new_tokens=40, ignore_eos=True)
    assert [result.tokens for result in found] == [result.tokens for result in plain]
    assert llm.service.counts.put_back > 0
    assert llm.target.arena.free == llm.target.arena.pages - 1


def test_noise_has_the_same_bits_on_every_device():
    from slipstream.sampling import gumbel, noise_bits

    tokens = torch.arange(100_000)
    assert torch.equal(noise_bits(0x0123456789ABCDEF, tokens.cuda()).cpu(), noise_bits(0x0123456789ABCDEF, tokens))
    torch.testing.assert_close(gumbel(7, tokens.cuda()).cpu(), gumbel(7, tokens), rtol=1e-14, atol=1e-14)
