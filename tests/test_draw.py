"""Drawing for all rows of a step at once, in plain torch: what `Sampler` draws row by row."""

import numpy as np
import pytest
import torch

from slipstream.kernels.draw import draw, noise_keys
from slipstream.kernels.draw_inputs import Draws, History
from slipstream.sampling import BEST, DRAWN, DRAWN_WITH_HISTORY, Sampler, Sampling, noise_key

# Every filter alone, in pairs, and all together; narrow and wide nuclei; options that change nothing.
OPTIONS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_k": 300},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.3, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.99},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 10**9, "top_p": 1.0, "min_p": 1.0},
    {"temperature": 0.05, "top_k": 5, "top_p": 0.9},
]
PENALTIES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logit_bias": {3: 5.0, 17: -100.0, 8: 2.5}},
    {"logit_bias": {5: 4.0}, "repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.25},
    {},
]


def logits(*shape, seed, dtype=torch.bfloat16):
    """(…, V) like a model's: a bulk, a few far above it, flat rows and steep ones, all with the ties of bfloat16."""
    rng = np.random.default_rng(seed)
    likely = (rng.random(shape) < 20 / shape[-1]) * rng.exponential(4, shape)
    x = (rng.normal(0, 2, shape) + likely) * rng.uniform(0.3, 1.6, (*shape[:-1], 1))
    return torch.from_numpy(x).to(torch.bfloat16).to(dtype)


def draws(samplings, seeds, positions, device="cpu"):
    """Draws as a host makes them: samplings and seeds (b,), positions (b, n) of the tokens after each row."""
    flat = np.zeros(Draws.size(*positions.shape), np.int32)
    host = Draws.of(flat, *positions.shape)
    host.put(samplings, np.ones(len(samplings), np.int64))
    sizes = np.full(*positions.shape)
    host.keys[:] = noise_keys([(seed, 0) for seed in seeds], sizes, positions.ravel()).reshape(*positions.shape, 2)
    return Draws.of(torch.from_numpy(flat).to(device), *positions.shape)


def by_sampler(rows, samplings, seeds, texts):
    """(b, n) the same token by token; texts[i][j]: (prompt, output) before the token after row j."""
    tokens = []
    for i, (sampling, seed) in enumerate(zip(samplings, seeds, strict=True)):
        for row, (prompt, output) in zip(rows[i], texts[i], strict=True):
            sampler = Sampler(sampling, prompt, seed)
            for token in output:
                sampler.push(token)
            tokens.append(sampler.sample(row))
    return torch.tensor(tokens, dtype=torch.int32).reshape(rows.shape[:2])


class Batch:
    """Sequences with a history, each with a drafted tree of n rows; one slot is left over."""

    def __init__(self, samplings, n, size, seed, device="cpu"):
        rng = np.random.default_rng(seed)
        b = len(samplings)
        self.samplings, self.seeds = samplings, rng.integers(0, 2**40, b).tolist()
        tokens = min(size, 40)  # few, so that many repeat
        prompts = [rng.integers(0, tokens, rng.integers(1, 12)).tolist() for _ in range(b)]
        outputs = [rng.integers(0, tokens, rng.integers(0, 12)).tolist() for _ in range(b)]
        ids, depths = rng.integers(0, tokens, (b, n)), np.full((b, n), -1)
        paths, self.texts = np.zeros((b, n, n), int), []
        for i in range(b):
            lines = [[0]]
            for j in range(1, n):
                lines.append([*lines[rng.integers(max(0, j - 3), j)], j])
            for j, line in enumerate(lines):
                depths[i, j], paths[i, j, : len(line)] = len(line) - 1, i * n + np.array(line)
            self.texts.append([(prompts[i], outputs[i] + ids[i, line].tolist()) for line in lines])
        lengths = np.array([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)])
        slots = rng.permutation(b + 1)[:b]
        step = [torch.from_numpy(x.astype(np.int32)).to(device) for x in (slots, ids, depths, paths)]
        kinds = (torch.uint8, torch.int32, torch.float32)
        state = [torch.full((b + 1, size), 7, dtype=kind, device=device) for kind in kinds]
        self.history = History(*state, *step)
        for i in range(b):
            self.history.begin(int(slots[i]), prompts[i], samplings[i].logit_bias)
        longest = max(map(len, outputs))
        said = np.array([o + [-1] * (longest - len(o)) for o in outputs], np.int32).reshape(b, longest)
        self.history.commit(self.history.slots, torch.from_numpy(said).to(device))
        self.draws = draws(samplings, self.seeds, lengths[:, None] + depths + 1, device)


def differing(found, expected):
    return int((found.cpu() != expected).sum())


# ---- what Sampler draws


@pytest.mark.parametrize(
    "options", [pytest.param(o, id=str(o), marks=() if o in OPTIONS[:12:4] else pytest.mark.slow) for o in OPTIONS]
)
def test_it_draws_what_the_sampler_draws(options):
    """300 rows each, 4,200 in all. Sums in another order may move the end of a nucleus by a tied token: none here."""
    n, size = 300, 1500
    rows, samplings, seeds = logits(1, n, size, seed=len(str(options))), [Sampling(**options)], [11]
    positions = np.arange(5, 5 + n)[None]
    tokens, value = draw(rows, draws(samplings, seeds, positions))
    texts = [[([0] * p, []) for p in positions[0].tolist()]]
    assert differing(tokens, by_sampler(rows, samplings, seeds, texts)) == 0
    assert torch.equal(value, rows.float().gather(2, tokens.long()[..., None])[..., 0])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_and_biases_follow_the_path(temperature):
    more = {"temperature": temperature, "top_k": 30, "top_p": 0.95}
    for seed in range(6):
        batch = Batch([Sampling(**options, **more) for options in PENALTIES], 9, 60, seed)
        rows = logits(len(PENALTIES), 9, 60, seed=seed)
        tokens, value = draw(rows, batch.draws, batch.history)
        assert differing(tokens, by_sampler(rows, batch.samplings, batch.seeds, batch.texts)) == 0
        for i, sampling in enumerate(batch.samplings):
            for j, (prompt, output) in enumerate(batch.texts[i]):
                sampler = Sampler(sampling, prompt)
                for token in output:
                    sampler.push(token)
                torch.testing.assert_close(value[i, j], sampler._adjusted(rows[i, j].float())[tokens[i, j]])


def test_a_batch_draws_what_its_rows_draw_alone():
    samplings = [Sampling(**options) for options in OPTIONS]
    rows, positions = logits(len(OPTIONS), 4, 400, seed=2), np.arange(4 * len(OPTIONS)).reshape(-1, 4)
    seeds = list(range(len(OPTIONS)))
    together, _ = draw(rows, draws(samplings, seeds, positions))
    for i, sampling in enumerate(samplings):
        for j in range(4):
            own = draws([sampling], [seeds[i]], positions[i : i + 1, j : j + 1])
            assert draw(rows[i : i + 1, j : j + 1], own)[0] == together[i, j]


# ---- worked examples


def drawn(row, repeats=400, **options):
    """The tokens that ever win."""
    rows = torch.tensor([row]).expand(repeats, -1)[None]
    tokens, _ = draw(rows, draws([Sampling(temperature=1.0, **options)], [0], np.arange(repeats)[None]))
    return sorted(set(tokens[0].tolist()))


def test_top_k_keeps_ties_with_the_last_of_them():
    assert drawn([1.0, 2.0, 2.0, 3.0, 2.0], top_k=2) == [1, 2, 3, 4]
    assert drawn([0.0, -0.0, -9.0, 0.0], top_k=1) == [0, 1, 3]


def test_the_nucleus_takes_ties_by_lower_id():
    even = [0.0] * 8
    assert drawn(even, top_p=0.5) == [0, 1, 2, 3]
    assert drawn(even, top_p=0.51) == [0, 1, 2, 3, 4]
    assert drawn([0.0, 5.0, 0.0, 5.0], top_p=0.3) == [1]


def test_the_nucleus_is_of_what_top_k_left():
    row = np.log([0.1, 0.4, 0.2, 0.3]).tolist()
    assert drawn(row, top_p=0.6) == [1, 3]
    assert drawn(row, top_p=0.6, top_k=2) == [1, 3]
    assert drawn(row, top_p=0.5, top_k=2) == [1]  # 4/7 reach it


def test_min_p_is_relative_to_the_most_probable():
    assert drawn(np.log([0.5, 0.26, 0.24]).tolist(), min_p=0.5) == [0, 1]
    assert drawn([3.0, 3.0, 2.9], min_p=1.0) == [0, 1]


def test_what_check_choice_refuses_is_reported():
    rows = torch.zeros(1, 4, 10)
    rows[0, 0, 3], rows[0, 1], rows[0, 2, 4] = torch.nan, -torch.inf, -torch.inf
    for options in OPTIONS:
        tokens, value = draw(rows, draws([Sampling(**options)], [0], np.arange(4)[None]))
        assert value[0].isnan().tolist() == [True, False, False, False]
        assert value[0].isneginf().tolist() == [False, True, False, False]
        assert ((tokens >= 0) & (tokens < 10)).all()


def test_padding_may_be_anything():
    batch = Batch([Sampling(temperature=0.0, repetition_penalty=2.0)] * 2, 4, 30, seed=1)
    batch.history.depths[:, 2:] = -1
    batch.history.paths[:, 2:] = 0
    rows = logits(2, 4, 30, seed=3)
    tokens, _ = draw(rows, batch.draws, batch.history)
    assert torch.equal(tokens[:, :2], by_sampler(rows, batch.samplings, batch.seeds, batch.texts)[:, :2])
    assert ((tokens >= 0) & (tokens < 30)).all()


# ---- what the host does


def test_noise_keys_are_the_noise_keys():
    positions = np.array([0, 1, 2, 77, 4095, 2**31 + 5, 2**40])
    for seed in (0, 1, 12345, 2**63 + 17, 2**64 - 1, -3, 2**70 + 1):
        for sample in (0, 1, 99):
            halves = noise_keys([(7, 7), (seed, sample)], np.array([1, len(positions)]), np.append(9, positions))[1:]
            assert halves.dtype == np.int32
            keys = [int(high) % 2**32 << 32 | int(low) % 2**32 for low, high in halves]
            assert keys == [noise_key(seed, sample, int(position)) for position in positions]


def test_draws_go_up_as_one_copy():
    flat = np.zeros(Draws.size(2, 3), np.int32)
    host, device = Draws.of(flat, 2, 3), Draws.of(torch.from_numpy(flat), 2, 3)
    assert host.keys.size + 14 == flat.size
    options = Sampling({}, 1.5, 0.25, -0.5, temperature=0.75, top_k=2**40, top_p=0.875, min_p=0.125)
    host.put([Sampling(), options], np.array([1, 1]))
    host.keys[1, 2] = 5, -6
    names = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "top_k")
    found = [getattr(device, name).tolist() for name in names]
    assert found == [[0, 0.75], [1, 0.875], [0, 0.125], [1, 1.5], [0, 0.25], [0, -0.5], [0, 2**31 - 1]]
    assert {getattr(device, name).dtype for name in names[:6]} == {torch.float32}
    assert device.keys[1].tolist() == [[0, 0], [0, 0], [5, -6]]


def test_a_slot_begins_anew_and_counts_what_is_committed():
    batch = Batch([Sampling()] * 2, 2, 10, seed=0)
    history = batch.history
    one, other = history.slots.tolist()
    kept = [state[other].clone() for state in (history.prompt, history.emitted, history.bias)]
    history.begin(one, [4, 4, 6], {2: -1.5})
    assert history.prompt[one].tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 0, 0]
    assert history.bias[one].tolist() == [0, 0, -1.5, *[0] * 7]
    assert not history.emitted[one].any()
    history.commit(history.slots, torch.tensor([[4, 9, 9], [-1, -1, -1]], dtype=torch.int32))
    history.commit(history.slots, torch.tensor([[9, -1, -1], [-1, -1, -1]], dtype=torch.int32))
    assert history.emitted[one].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 3]
    assert all(map(torch.equal, kept, [state[other] for state in (history.prompt, history.emitted, history.bias)]))


def test_who_may_draw_and_who_needs_a_history():
    plain, biased = Sampling(temperature=1.0, top_p=0.9), Sampling(logit_bias={1: 1.0})
    assert plain.within_step == DRAWN
    assert Sampling().within_step == BEST
    assert biased.within_step == DRAWN_WITH_HISTORY
    assert Sampling(bad_words=((1,),)).within_step is None
    assert Sampling(processors=(object(),)).within_step is None
    assert all(Sampling(**options).within_step == DRAWN_WITH_HISTORY for options in PENALTIES[:4])
