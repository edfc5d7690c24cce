"""How the next token is chosen from the target's logits, and the noise that it is chosen with.

The noise is a function of (seed, sample index, position, token id) and of nothing else. So a sampled text is the same,
token for token, with any drafter or none: every sample of a position uses the same noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import torch

from slipstream.checks import integer, real
from slipstream.compiled import compiled
from slipstream.errors import NumericalError, OptionError

# How a step on a device can choose tokens. Each way also serves those whom the ways before it would.
WAYS = BEST, DRAWN, DRAWN_WITH_HISTORY = "best", "drawn", "drawn with history"
COLDEST = 1e-6  # the lowest temperature: logits divided by much less become infinite


@dataclass(frozen=True)
class Sampling:
    """What to do with the logits, in this order. The defaults are greedy decoding."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0  # over prompt and output, as in transformers
    presence_penalty: float = 0.0  # over the output alone, as in OpenAI's API
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences never to complete
    processors: tuple[Any, ...] = ()  # transformers' LogitsProcessor objects, stateful ones included
    temperature: float = 0.0  # 0: the most probable token, whatever follows below
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, real(name, getattr(self, name)))
        object.__setattr__(self, "top_k", integer("top_k", self.top_k))
        for name, good, needs in (
            ("temperature", self.temperature == 0 or self.temperature >= COLDEST, f"0 (greedy) or at least {COLDEST}"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("bad_words", all(self.bad_words), "free of empty words"),
        ):
            if not good:
                raise OptionError(f"{name}={getattr(self, name)} is out of range: it must be {needs}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the temperature is applied."""
        return bool(self.logit_bias or self.penalises or self.bad_words or self.processors)

    @property
    def filters(self) -> bool:
        """Whether tokens are ruled out by their probabilities."""
        return bool(self.top_k or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def plain(self) -> bool:
        """Whether the raw logits decide alone, so that a forward may choose the token without the history."""
        return self == Sampling()

    @cached_property
    def within_step(self) -> str | None:
        """How a step can choose tokens by these rules. None: processors and bad words need `Sampler`."""
        if self.processors or self.bad_words:
            return None
        if self.plain:
            return BEST
        return DRAWN_WITH_HISTORY if self.logit_bias or self.penalises else DRAWN


class Sampler:
    """Chooses one sequence's tokens, by its history and its noise. Accept rules use it at every node of a draft."""

    def __init__(self, sampling: Sampling, history: Sequence[int], seed: int = 0, sample: int = 0) -> None:
        self.sampling = sampling
        self.seed, self.sample_index = seed, sample
        self.seconds = 0.0  # spent in `sample`, which is used where a step can't choose tokens itself
        self.position = len(history)  # of the token to be chosen next
        self.prompt = list(history)
        self.output: list[int] = []
        self._ids: torch.Tensor | None = None  # (1, capacity) int64, kept only where a processor reads it
        if sampling.processors:
            self._ids = torch.empty(1, len(history) + 256, dtype=torch.long)
            self._ids[0, : len(history)] = torch.tensor(self.prompt, dtype=torch.long)

    def push(self, token: int) -> None:
        """Append a chosen token to the history."""
        self.output.append(token)
        if self._ids is not None:
            if self.position == self._ids.shape[1]:
                self._ids = torch.cat([self._ids, torch.empty_like(self._ids)], dim=1)
            self._ids[0, self.position] = token
        self.position += 1

    def sample(self, row: torch.Tensor) -> int:
        """A token from one row (V,) of logits, by the Gumbel-max trick with this position's noise."""
        if self.sampling.plain:
            return self.best(row)
        clock = perf_counter()
        token = self._sample(row)
        self.seconds += perf_counter() - clock
        return token

    def _sample(self, row: torch.Tensor) -> int:
        ids, logits = self.candidates(row)
        if self.sampling.greedy:
            return self.best(logits)
        tokens = torch.arange(len(logits), device=logits.device) if ids is None else ids
        return int(tokens[self.best(logits + gumbel(self.key(), tokens))])

    def distribution(self, row: torch.Tensor) -> torch.Tensor:
        """(V,) the probabilities that `sample` draws from, in float64, on the row's device."""
        logits = self.warped(row)
        if self.sampling.greedy:
            p = torch.zeros(len(logits), dtype=torch.float64, device=row.device)
            p[self.best(logits)] = 1
            return p
        return torch.softmax(logits.double(), -1)

    def flip(self, probability: float, draw: int) -> bool:
        """A coin flip for the draw-th candidate at this position, with noise independent of all tokens' noise."""
        return uniform(self.key("flip"), draw) < probability

    def draw(self, weights: torch.Tensor) -> int:
        """A token drawn from unnormalised weights (V,): the first at which the running sum reaches a random share of
        the total."""
        return self.taken(*self.drawn(weights).tolist())

    def drawn(self, weights: torch.Tensor) -> torch.Tensor:
        """(2,) the token that `draw` takes and the total weight, still on the device."""
        total = weights.cumsum(0)
        # A parallel sum may grow by rounding at a token of weight 0: such a token is never taken.
        reached = torch.where(weights > 0, total, -1.0)
        token = (reached >= self.shares(1)[0] * reached.amax()).byte().argmax()
        return torch.stack([token.to(weights.dtype), total[-1]])

    def shares(self, count: int) -> list[float]:
        """The random shares that `draw` uses at this position and those after it."""
        positions = range(self.position, self.position + count)
        return [uniform(noise_key(self.seed, self.sample_index, position, "draw"), 0) for position in positions]

    def taken(self, token: float, mass: float) -> int:
        """The token of `drawn`, on the host. Refuses NaN, and weights that are all zero."""
        check_choice(mass or -np.inf, self.position)
        return int(token)

    def key(self, stream: str = "") -> int:
        return noise_key(self.seed, self.sample_index, self.position, stream)

    def warped(self, row: torch.Tensor) -> torch.Tensor:
        """One row (V,) of logits with all of `Sampling` applied, ready for softmax."""
        ids, logits = self.candidates(row)
        if ids is None:
            return logits
        return torch.full_like(row, -torch.inf, dtype=logits.dtype).index_copy(0, ids, logits)

    def candidates(self, row: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The tokens that remain possible (None: all), and their logits."""
        s = self.sampling
        logits = self._adjusted(row.float())
        for processor in s.processors:
            history = self._ids[:, : self.position].to(row.device)  # type: ignore[index]
            logits = processor(history, logits[None])[0]
        if s.greedy:
            return None, logits
        check_choice(float(logits.max()), self.position)
        logits, ids = logits / s.temperature, None
        if 0 < s.top_k < len(logits):
            ids = torch.nonzero(logits >= torch.topk(logits, s.top_k).values[-1]).flatten()
            logits = logits[ids]
        if s.top_p < 1:
            kept = nucleus(torch.softmax(logits, -1), s.top_p)
            ids, logits = kept if ids is None else ids[kept], logits[kept]
        if s.min_p > 0:
            p = torch.softmax(logits, -1)
            kept = torch.nonzero(p >= s.min_p * p.max()).flatten()
            ids, logits = kept if ids is None else ids[kept], logits[kept]
        return ids, logits

    def _adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with biases, penalties and bad words. A copy if anything is changed: the row belongs to the target."""
        s = self.sampling
        if not s.adjusts:
            return logits
        logits = logits.clone()
        if s.logit_bias:
            ids = torch.tensor(list(s.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(s.logit_bias.values()), device=logits.device)
        if s.repetition_penalty != 1:
            seen = torch.tensor(sorted({*self.prompt, *self.output}), device=logits.device)
            value = logits[seen]
            logits[seen] = torch.where(value < 0, value * s.repetition_penalty, value / s.repetition_penalty)
        if (s.presence_penalty or s.frequency_penalty) and self.output:
            emitted, counts = np.unique(self.output, return_counts=True)
            minus = s.presence_penalty + s.frequency_penalty * counts
            logits[torch.from_numpy(emitted).to(logits.device)] -= torch.from_numpy(minus).to(logits)
        if s.bad_words:
            longest = max(map(len, s.bad_words))
            tail = (*self.prompt[-longest:], *self.output[-longest:])
            for *head, last in s.bad_words:
                if not head or tail[-len(head) :] == tuple(head):
                    logits[last] = -torch.inf
        return logits

    def best(self, logits: torch.Tensor) -> int:
        """The id of the largest of (V,). Refuses NaN, and rows in which no token is possible."""
        best = int(torch.argmax(logits))  # NaN counts as the largest, so checking the winner is enough
        check_choice(float(logits[best]), self.position)
        return best


def nucleus(p: torch.Tensor, mass: float) -> torch.Tensor:
    """Ids of the fewest tokens of p (V,) that together reach `mass`, the most probable first."""
    # Sorting a whole vocabulary takes milliseconds, and the tail is rarely needed.
    likely = torch.nonzero(p >= 1e-4).flatten()
    if float(p[likely].sum()) <= mass:
        likely = torch.arange(len(p), device=p.device)
    ordered, order = torch.sort(p[likely], descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered  # a token is dropped if those before it already reach the mass
    return likely[order[before < mass]]


def check_choice(logit: float, position: int) -> None:
    """Refuse a token whose logit is NaN, or minus infinity because every token was ruled out."""
    if np.isnan(logit):
        raise NumericalError(
            f"the model's logits for position {position} contain NaN: the weights are damaged, or the dtype "
            "overflows (try dtype='float32')"
        )
    if logit == -np.inf:
        raise NumericalError(
            f"no token is possible at position {position}: bad_words, a grammar or a logits processor rules "
            "every one of them out"
        )


# ---- noise: integers first, so that every device computes the same bits

_LOW = 0xFFFFFFFF


def _splitmix(x: int) -> int:
    """One round of the splitmix64 finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def noise_key(seed: int, sample: int, position: int, stream: str = "") -> int:
    """64 bits for one position of one text. Streams are independent of each other."""
    key = _splitmix(seed & 0xFFFFFFFFFFFFFFFF)
    for part in (sample, position, *stream.encode()):
        key = _splitmix(key ^ part)
    return key


def noise_bits(key: int, tokens: torch.Tensor) -> torch.Tensor:
    """32 random bits for each token id, held in int64."""
    tokens = tokens.to(torch.int64)
    if isinstance(key, int) and tokens.device.type == "cpu" and tokens.ndim == 1:
        # The same in one compiled pass: twenty tensor operations would take most of a token's time.
        return torch.from_numpy(_bits_of_all(np.uint64(key), tokens.numpy()))
    bits: torch.Tensor = _bits(key, tokens)
    return bits


def _bits(key: int, x: Any) -> Any:
    """Two keyed rounds of a 32-bit mixer, over an integer or a tensor of them."""
    x = x * 0x9E3779B1
    for half in (key & _LOW, key >> 32):
        x = (x + half) & _LOW
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
        x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
        x = x ^ (x >> 16)
    return x


@compiled
def _bits_of_all(key, tokens):  # type: ignore[no-untyped-def]
    """`_bits` of (n,) integers."""
    low, found = np.uint64(_LOW), np.empty(len(tokens), np.int64)
    for i in range(len(tokens)):
        x = np.uint64(tokens[i]) * np.uint64(0x9E3779B1)
        for half in (key & low, key >> np.uint64(32)):
            x = (x + half) & low
            x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & low
            x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & low
            x = x ^ (x >> np.uint64(16))
        found[i] = np.int64(x)
    return found


def gumbel(key: int, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, for each token id; it does not depend on the other ids."""
    u = (noise_bits(key, tokens).double() + 0.5) / 2**32  # inside (0, 1), never at its ends
    return -torch.log(-torch.log(u))


def uniform(key: int, index: int) -> float:
    """One number in (0, 1)."""
    return float((_bits(key, index) + 0.5) / 2**32)
