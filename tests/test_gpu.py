"""The laws on a GPU (`make test-gpu`): in float32 a text is the same with and without drafts, and the CPU's."""

import copy

import pytest
import torch

from families import FAMILIES
from oracle import Oracle
from slipstream import LLM, drafters

if not torch.cuda.is_available():
    pytest.exit("these tests need a CUDA device, and torch sees none", returncode=1)

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [40], [11, 12, 11, 12, 11, 13, 50, 51, 52, 50]]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_does_not_depend_on_drafts_or_device(family, sampling, tiny):
    options = {"max_new_tokens": 20, **sampling}
    expected = [r.tokens for r in LLM(tiny(family), drafter="none").generate(PROMPTS, **options)]
    model = copy.deepcopy(tiny(family)).to("cuda")
    llm = LLM(model, drafter="none")
    assert [r.tokens for r in llm.generate(PROMPTS, **options)] == expected
    llm.engine.drafter = Oracle(llm.target, [p + e for p, e in zip(PROMPTS, expected, strict=True)])
    assert [r.tokens for r in llm.generate(PROMPTS, **options)] == expected


@pytest.mark.parametrize("name", drafters.names())
def test_every_drafter_works_there(name, tiny):
    model = copy.deepcopy(tiny("llama")).to("cuda")
    expected = [r.tokens for r in LLM(model, drafter="none").generate(PROMPTS, max_new_tokens=20)]
    for trial in drafters.find(name).trials(model):
        llm = LLM(model, drafter=name, **trial)
        assert [r.tokens for r in llm.generate(PROMPTS, max_new_tokens=20)] == expected


def test_noise_has_the_same_bits_on_every_device():
    from slipstream.sampling import gumbel, noise_bits

    tokens = torch.arange(100_000)
    assert torch.equal(noise_bits(0x0123456789ABCDEF, tokens.cuda()).cpu(), noise_bits(0x0123456789ABCDEF, tokens))
    torch.testing.assert_close(gumbel(7, tokens.cuda()).cpu(), gumbel(7, tokens), rtol=1e-14, atol=1e-14)
