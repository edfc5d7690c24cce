"""The measurement: the same prompts for all contestants, interleaved and repeated, so that noise affects all alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.evaluate.contestants import Answer, Contestant, Decoding, Ours, Peer
from slipstream.evaluate.workloads import Prompt


@dataclass(frozen=True)
class Item:
    """One turn of one prompt, as tokens, and the answer of plain decoding to it."""

    id: str
    category: str
    tokens: list[int]
    plain: list[int]
    first_token_seconds: float = 0.0  # of plain decoding


@dataclass(frozen=True)
class MeasuredRun:
    """One contestant's answer to one item."""

    contestant: str
    item: str
    category: str
    repeat: int
    answer: Answer
    equal: bool | None  # whether the text equals plain decoding's; None if texts are sampled with other noise
    group: int  # the same number: answered together, so that they share one reading of the clock


def prepare(plain: Ours, prompts: Sequence[Prompt], decoding: Decoding) -> Iterator[Item]:
    """Answer every turn by plain decoding. Later turns contain these answers, so that all contestants get the same
    prompts."""
    for prompt in prompts:
        messages: list[dict[str, str]] = []
        for turn, content in enumerate(prompt.turns):
            messages.append({"role": "user", "content": content})
            asked = messages if plain.llm.tokenizer.chat_template else content
            tokens = plain.llm.request(asked).tokens
            answer = plain.answer(tokens, decoding)
            name = prompt.id if len(prompt.turns) == 1 else f"{prompt.id}/{turn + 1}"
            yield Item(name, prompt.category, tokens, answer.tokens, answer.first_token_seconds)
            text = plain.llm.tokenizer.decode(answer.tokens, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text})


def measure(
    contestants: Sequence[Contestant], items: Sequence[Item], decoding: Decoding, repeats: int, batch: int = 1
) -> Iterator[MeasuredRun]:
    """Run every contestant on every item, `batch` items together, `repeats` times, after a warm-up of each. The order
    of contestants rotates from batch to batch."""
    groups = [items[i : i + batch] for i in range(0, len(items), batch)]
    for contestant in contestants:
        contestant.answers([item.tokens for item in groups[0]], decoding)
    for repeat in range(repeats):
        for number, group in enumerate(groups):
            first = (number + repeat) % len(contestants)
            for contestant in [*contestants[first:], *contestants[:first]]:
                answers = contestant.answers([item.tokens for item in group], decoding)
                comparable = decoding.temperature == 0 or not isinstance(contestant, Peer)
                for item, answer in zip(group, answers, strict=True):
                    equal = answer.tokens == item.plain if comparable else None
                    yield MeasuredRun(contestant.name, item.id, item.category, repeat, answer, equal, number)
