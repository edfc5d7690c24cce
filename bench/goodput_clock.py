"""`bench/goodput.py drafts` by a clock instead of a machine: the pilot alone decides, steps take what they took on an
H200 with a 7B shape, and drafted tokens are right by chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from slipstream.budget.costs import Costs, full
from slipstream.budget.pilot import Draft, Pilot, Text
from slipstream.tree import TokenTree

# Milliseconds of captured steps by rows; beyond 128 rows as many per row as between 64 and 256.
STEPS = {1: 4.05, 8: 4.07, 16: 4.18, 32: 4.75, 64: 4.94, 128: 6.75, 256: 11.0, 512: 19.0, 1024: 37.0}
MEASURED = 128  # rows up to which the pilot knows them beforehand
# Milliseconds, and milliseconds for each sequence: of drafting, of the host around a step with drafts, and of what a
# plain step can't hide of it.
DRAFTING, HANDLING, PLAIN = (0.05, 0.03), (0.25, 0.045), (0.0, 0.03)
NAME = "replayed"

Policy = Callable[[list[Text], list[int]], tuple[list[int], float]]


def device(rows: int) -> float:
    return float(np.interp(rows, list(STEPS), list(STEPS.values())))


def taken(times: tuple[float, float], sequences: int) -> float:
    return times[0] + sequences * times[1]


def finish(policy: Policy, sequences: int, tokens: int, right: float, seed: int) -> float:
    """Tokens per second of all sequences until the last one ends. The policy is given the texts that run and how many
    of the next tokens a draft would have right, and says how many of them each step verifies, and how long it took."""
    rng, left, texts, clock = np.random.default_rng(seed), [tokens] * sequences, [Text() for _ in range(sequences)], 0.0
    while running := [i for i in range(sequences) if left[i] > 0]:
        chances = [int(rng.geometric(1 - right)) - 1 for _ in running]
        verified, milliseconds = policy([texts[i] for i in running], chances)
        clock += milliseconds
        for i, nodes, chance in zip(running, verified, chances, strict=True):
            left[i] -= 1 + min(nodes, chance)
    return 1e3 * sequences * tokens / clock


def fixed(length: int) -> Policy:
    def policy(_: list[Text], chances: list[int]) -> tuple[list[int], float]:
        n = len(chances)
        if not length:
            return [0] * n, device(n) + taken(PLAIN, n)
        return [length] * n, device(n * (1 + length)) + taken(DRAFTING, n) + taken(HANDLING, n)

    return policy


class Piloted:
    """What `auto` would do, drafting as many tokens as the longest fixed length."""

    def __init__(self, right: float, longest: int) -> None:
        known = {rows: seconds / 1e3 for rows, seconds in STEPS.items() if rows <= MEASURED}
        self.pilot, self.right, self.longest = Pilot(Costs(known, flat=True), [NAME]), right, longest
        self.resting = 0

    def __call__(self, texts: list[Text], chances: list[int]) -> tuple[list[int], float]:
        n, pilot = len(texts), self.pilot
        plain = device(n) + taken(PLAIN, n)
        if self.resting > 0:
            self.resting, pilot.steps = self.resting - 1, pilot.steps + 1
            pilot.costs.observe(1, n, plain / 1e3)
            return [0] * n, plain
        drafts, asked = [Draft(text, TokenTree.root(0), self.longest) for text in texts], []
        for source in pilot.asks({NAME}, drafts):
            for draft in drafts:
                tokens = range(1, 1 + self.longest)
                draft.tree = TokenTree.chain(0, list(tokens), source=NAME, raw=[self.right] * self.longest)
            source.took(taken(DRAFTING, n) / 1e3)
            asked.append(source)
        if not asked:
            self.resting = pilot.decline({NAME}, n)
            pilot.costs.observe(1, n, plain / 1e3)
            return [0] * n, plain
        kept = pilot.choose(drafts, asked)
        rows = sum(map(len, kept))
        pilot.judge()
        for draft, tree, chance in zip(drafts, kept, chances, strict=True):
            draft.text.see(min(len(tree) - 1, chance))
            pilot.calibration.learn(draft.tree, [*range(1, 1 + min(chance, self.longest)), 0][: self.longest])
        pilot.costs.observe(rows - n + 1, n, device(rows) / 1e3)
        pilot.handling[full(n)].see(taken(HANDLING, n) / 1e3)
        return [len(tree) - 1 for tree in kept], device(rows) + taken(DRAFTING, n) + taken(HANDLING, n)


def by_the_clock(
    sizes: list[int], right: float, tokens: int, lengths: list[int], repeats: int
) -> Iterator[tuple[int, dict[str, float], float]]:
    """For each number of sequences: tokens per second of plain decoding, of each length and of `auto`, and `auto` over
    the best of the others. It goes from size to size, as in a server; its first answers of a size are not counted."""
    auto = Piloted(right, max(lengths))
    for n in sizes:
        finish(auto, n, tokens, right, 0)
        ways = {f"{length or 'plain'}": fixed(length) for length in (0, *lengths)} | {"auto": auto}
        rates = {
            name: float(np.mean([finish(way, n, tokens, right, seed) for seed in range(1, 1 + repeats)]))
            for name, way in ways.items()
        }
        yield n, rates, rates["auto"] / max(rate for name, rate in rates.items() if name != "auto")
