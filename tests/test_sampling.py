"""Noise, filters and penalties; each against its definition or against transformers' own processor."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream.errors import NumericalError, OptionError
from slipstream.sampling import Sampler, Sampling, _bits, gumbel, noise_bits, noise_key, nucleus, uniform

HISTORY = [3, 1, 4, 1, 5, 9, 2, 6]


def row(seed=0, size=1000):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def warped(**options):
    return Sampler(Sampling(**options), HISTORY).warped(row())


def by_transformers(*processors):
    ids, scores = torch.tensor([HISTORY]), row()[None]
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


@pytest.mark.parametrize(
    ("options", "processors"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 20}, [TopKLogitsWarper(20)]),
        ({"temperature": 1.0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"temperature": 3.0, "top_p": 0.999}, [TemperatureLogitsWarper(3.0), TopPLogitsWarper(0.999)]),
        ({"temperature": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
        ({"bad_words": ((7,), (2, 6, 8), (6, 9))}, [NoBadWordsLogitsProcessor([[7], [2, 6, 8], [6, 9]])]),
        (
            {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
            [
                RepetitionPenaltyLogitsProcessor(1.1),
                TemperatureLogitsWarper(0.8),
                TopKLogitsWarper(50),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.05),
            ],
        ),
    ],
)
def test_filters_agree_with_transformers(options, processors):
    torch.testing.assert_close(warped(**options), by_transformers(*processors))


def test_penalties_count_the_output_alone():
    sampler = Sampler(Sampling(presence_penalty=0.5, frequency_penalty=0.25), HISTORY)
    for token in (3, 3, 8):
        sampler.push(token)
    change = sampler.warped(row()) - row()
    assert change[[3, 8, 1]].tolist() == pytest.approx([-1.0, -0.75, 0.0], abs=1e-6)


def test_repetition_is_penalised_in_prompt_and_output():
    sampler = Sampler(Sampling(repetition_penalty=1.3), HISTORY)
    for token in (8, 7):
        sampler.push(token)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[*HISTORY, 8, 7]]), row()[None])[0]
    torch.testing.assert_close(sampler.warped(row()), expected)


def test_a_processor_sees_the_whole_history_however_long_it_grows():
    seen = []
    sampler = Sampler(Sampling(processors=(lambda ids, scores: seen.append(ids[0].tolist()) or scores,)), HISTORY)
    said = list(range(600))
    for token in said:
        sampler.push(token)
    sampler.sample(row())
    assert seen == [HISTORY + said]


def test_logit_bias_adds():
    change = warped(logit_bias={5: 2.0, 6: -1.0}) - row()
    assert change[[5, 6, 7]].tolist() == pytest.approx([2.0, -1.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5, "top_p": 0.9, "repetition_penalty": 2.0, "logit_bias": {1: 1.0}, "bad_words": ((7,),)},
        {"processors": (lambda _, scores: scores.zero_(),)},
        {"temperature": 0.5, "processors": (lambda _, scores: scores.zero_(),)},
    ],
    ids=["by us", "by a processor", "by a processor, sampled"],
)
def test_the_targets_row_is_never_written_to(options):
    logits = row()
    before = logits.clone()
    Sampler(Sampling(**options), HISTORY).sample(logits)
    assert torch.equal(logits, before)


def test_nucleus_is_the_smallest_set_that_reaches_the_mass():
    p = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])
    assert nucleus(p, 0.5).tolist() == [1, 3]
    assert nucleus(p, 0.41).tolist() == [1, 3]
    assert nucleus(p, 0.39).tolist() == [1]
    assert sorted(nucleus(p, 0.999).tolist()) == [0, 1, 2, 3, 4]
    flat = torch.full((50_000,), 1 / 50_000)  # nothing is likely: the tail is needed after all
    assert len(nucleus(flat, 0.5)) == pytest.approx(25_000, abs=5)


# ---- noise


def test_noise_is_a_function_of_its_key_and_the_token_alone():
    key = noise_key(seed=1, sample=2, position=3)
    whole = gumbel(key, torch.arange(1000))
    assert torch.equal(gumbel(key, torch.tensor([7, 500])), whole[[7, 500]])
    others = [noise_key(0, 2, 3), noise_key(1, 0, 3), noise_key(1, 2, 4), noise_key(1, 2, 3, "flip")]
    assert len({key, *others}) == 5


def test_noise_bits_are_the_same_in_one_pass_and_by_tensors():
    tokens = torch.cat([torch.arange(300), torch.tensor([2**31 - 1, 2**31, 2**32 - 1, 151_935])])
    for key in (0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, noise_key(3, 1, 4)):
        found = noise_bits(key, tokens)
        assert found.dtype == torch.int64
        assert torch.equal(found, noise_bits(key, tokens[None])[0])
        assert found.tolist() == [_bits(key, token) for token in tokens.tolist()]


def test_noise_bits_are_pinned():
    """The same bits everywhere and for ever: a changed mixer would silently change every sampled text."""
    assert noise_key(0, 0, 0) == 0x238275BC38FCBE91
    assert noise_key(1, 2, 3, "flip") == 0x77FF4FDB7F063395
    assert noise_bits(0x0123456789ABCDEF, torch.arange(4)).tolist() == [3833571298, 1012024772, 3633280870, 2119860556]


def test_one_number_has_the_bits_of_a_tokens_noise():
    key = noise_key(1, 2, 3, "flip")
    assert [uniform(key, i) for i in range(4)] == ((noise_bits(key, torch.arange(4)).double() + 0.5) / 2**32).tolist()


@pytest.mark.slow
def test_draws_follow_their_weights_and_never_hit_what_weighs_nothing():
    weights, counts = np.array([0.0, 3.0, 0.0, 1.0, 0.0]), np.zeros(5)
    for position in range(8_000):
        sampler = Sampler(Sampling(temperature=1.0), [], seed=3)
        sampler.position = position
        counts[sampler.draw(torch.from_numpy(weights))] += 1
    assert np.abs(counts / counts.sum() - weights / 4).max() < 0.02
    assert not counts[weights == 0].any()
    with pytest.raises(NumericalError, match="no token is possible"):
        sampler.draw(torch.zeros(5))
    with pytest.raises(NumericalError, match="NaN"):
        sampler.draw(torch.tensor([1.0, torch.nan]))


def test_noise_is_gumbel_distributed():
    """Mean and variance over a million draws, and no correlation between neighbouring tokens or positions."""
    draws = torch.stack([gumbel(noise_key(5, 0, p), torch.arange(2000)) for p in range(500)])
    assert float(draws.mean()) == pytest.approx(0.5772, abs=0.006)
    assert float(draws.var()) == pytest.approx(np.pi**2 / 6, abs=0.02)
    centred = draws - draws.mean()
    for shifted in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(float(shifted.mean())) < 0.007
    coins = np.array([uniform(noise_key(5, 0, p, "flip"), 0) for p in range(20_000)])
    assert abs((coins < 0.3).mean() - 0.3) < 0.015


@pytest.mark.slow
def test_samples_follow_the_softmax():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    p = torch.softmax(logits, -1).numpy()
    counts, sampler = np.zeros(4), Sampler(Sampling(temperature=1.0), [], seed=3)
    for position in range(8_000):
        sampler.position = position
        counts[sampler.sample(logits)] += 1
    assert np.abs(counts / counts.sum() - p).max() < 0.015


# ---- what is refused


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"bad_words": ((),)},
    ],
)
def test_values_out_of_range_are_refused_by_name(option):
    with pytest.raises(OptionError, match=next(iter(option))):
        Sampling(**option)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}])
def test_nan_and_impossible_rows_are_refused(options):
    sampler = Sampler(Sampling(logit_bias={0: 0.0}, **options), HISTORY)
    broken = row()
    broken[3] = torch.nan
    with pytest.raises(NumericalError, match="position 8 contain NaN"):
        sampler.sample(broken)
    with pytest.raises(NumericalError, match="no token is possible at position 8"):
        sampler.sample(torch.full((10,), -torch.inf))
