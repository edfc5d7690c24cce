"""Chains that a head continues token by token: drawn ones, and beams that are merged into a tree.

Everything has a fixed shape and is computed on the head's device. Beams are merged by comparing them with each other as
tensors (ReDrafter's dynamic tree attention), without a trie or the host.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from slipstream.drafters._head import SMALL, HeadDrafter, HeadOptions
from slipstream.errors import OptionError
from slipstream.heads.growth import Record, grow_depth, keep_best, new_record
from slipstream.heads.packing import likeliest, pack, pack_chains, pack_first
from slipstream.kernels.ops import best_tokens
from slipstream.residuals import LEAST
from slipstream.sampling import gumbel

if TYPE_CHECKING:
    from slipstream.targets.base import Target

Carry = Any  # a head's state of its chains; its type is up to the head


class ChainDrafter(HeadDrafter):
    """A head that can predict the token after each of several chains."""

    @abstractmethod
    def start(self, *inputs: Tensor) -> Carry:
        """One chain per sequence: the root alone."""

    @abstractmethod
    def logits(self, carry: Carry, depth: int) -> Tensor:
        """(b, w, V) logits of the token after each chain, `depth` tokens after the root."""

    @abstractmethod
    def advance(self, carry: Carry, chain: Tensor, tokens: Tensor, depth: int) -> Carry:
        """Extend chains by their depth-th token. Each new chain is the old one with the number in `chain` (b, w'),
        followed by its token in `tokens` (b, w')."""

    def draws(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        *mine, keys, temperature = inputs
        carry = self.start(*mine)
        chain = torch.zeros((len(keys), self.width), dtype=torch.long, device=keys.device)
        tokens, probability, rows = list[Tensor](), list[Tensor](), list[Tensor]()
        first = None
        for depth in range(self.length):
            if depth:
                carry = self.advance(carry, chain, tokens[-1], depth)
                chain = torch.arange(self.width, device=keys.device).expand_as(chain)
            logits = self.logits(carry, depth)
            if self.first and not depth:
                first = likeliest(logits[:, 0], self.first)
            drawn, p, q = draw(logits, keys[:, depth], temperature, 1 if depth else self.width)
            tokens.append(drawn.flatten(1))  # (b, width)
            probability.append(p.flatten(1))
            rows.append(q)  # (b, 1, V), then (b, width, V)
        chains = pack_chains(torch.stack(tokens, 2), torch.stack(probability, 2))
        return pack_first(chains, first), torch.cat(rows, 1)


def draw(logits: Tensor, key: Tensor, temperature: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`count` tokens from each row of logits (b, w, V), without replacement and in draw order, with the noise of key
    (b,). Returns tokens (b, w, count), their probabilities (0: q has fewer tokens), and q (b, w, V)."""
    logp = torch.log_softmax(logits.double() / temperature[:, None, None], -1)
    q = logp.exp()
    q = q.where(q > LEAST, 0.0)
    noise = gumbel(cast(Any, key[:, None]), torch.arange(q.shape[-1], device=q.device))[:, None]  # (b, 1, V)
    # The largest, in order, are draws without replacement.
    best = (logp + noise).where(q > 0, -torch.inf).topk(count)
    least = torch.finfo(torch.float32).tiny  # not 0 in float32 either, however improbable: 0 means no draw
    p = q.gather(-1, best.indices).clamp(min=least).where(best.values > -torch.inf, 0)
    return best.indices, p, q


@dataclass(frozen=True)
class BeamOptions(HeadOptions):
    beams: int = 8  # paths kept at every depth; mode=sample: chains, whose first tokens differ
    length: int = 5  # of each
    every: bool = True  # verify beams that were dropped on the way too; False: only those that reach the end
    compress: bool = True  # with every=False, merge prefixes that beams share; False: verify them once per beam

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beams < 1 or self.length < 1:
            raise OptionError(f"beams and length must be at least 1, found {self.beams} and {self.length}")


class BeamDrafter(ChainDrafter):
    """The head's most probable paths."""

    Options = BeamOptions

    def __init__(self, target: Target, tokenizer: Any, options: BeamOptions) -> None:
        super().__init__(target, tokenizer, options)
        self.width = min(options.beams, self.head.config.vocab_size)
        self.length = min(options.length, self.head.reach or options.length)
        self.ordered = options.every
        if self.ordered and not self.fixed:
            self.sizes = (SMALL,)

    def few(self, carry: Carry, depth: int) -> Tensor:
        """(b, w, V') logits of the tokens that may be drafted."""
        return self.logits(carry, depth)

    def best(self, *inputs: Tensor) -> Tensor:
        carry, width, length = self.start(*inputs), self.width, self.length
        if self.ordered:  # no depth has more than `most` of the `most` best nodes
            width, length = min(width, self.most), min(length, self.most)
        record = new_record(len(inputs[0]), length * width, self.device)
        number = first = None  # number: of the nodes at which the beams end; None: the root
        for depth in range(length):
            logits = self.few(carry, depth)
            if self.first and not depth:
                first = likeliest(logits[:, 0], self.first)
                first = first if self.names is None else self.names[first]
            # (b, w, width): no beam has more than `width` children among the best
            logp, ids = best_tokens(logits, width)
            tokens, chain, number = grow_depth(logp, ids, number, self.names, None, record, depth * width, width, False)
            if depth + 1 < length:
                carry = self.advance(carry, chain, tokens, depth + 1)
        if self.options.every:  # nodes of all depths are kept, each once: there is nothing to merge
            return keep_best(record, None, first, length * width)
        beams, logp = finished(record, width)
        return pack_first(overlay(beams, logp.exp(), self.options.compress), first)


def finished(record: Record, width: int) -> Record:
    """(b, w, n) the tokens of the beams that reach the end, and their log-probabilities given the tokens before them.
    Each beam is followed back to the root."""
    tokens, parents = record[0].unflatten(2, (-1, width)).unbind(1)  # (b, n, w) each
    logp = record[1][:, 0].unflatten(1, (-1, width))
    at = torch.arange(width, device=tokens.device).expand(len(tokens), -1)
    spelled, odds = list[Tensor](), list[Tensor]()
    for depth in reversed(range(tokens.shape[1])):
        spelled.insert(0, tokens[:, depth].gather(1, at))
        odds.insert(0, logp[:, depth].gather(1, at))
        at = (parents[:, depth].gather(1, at).long() - 1) % width  # the nodes of a depth have neighbouring numbers
    return torch.stack(spelled, 2), torch.stack(odds, 2)


def prefix_match(beams: Tensor) -> Tensor:
    """(b, w, n) -> (b, w, n): [·, i, j] is the first beam whose first j + 1 tokens equal beam i's."""
    same = beams[:, :, None] == beams[:, None]  # (b, w, w, n) token by token
    spelled = same.int().cumprod(-1)  # the whole prefix
    return spelled.argmax(2)


def overlay(beams: Tensor, probability: Tensor, compress: bool = True) -> Tensor:
    """Beams (b, w, n) as a packed tree (b, 3, w·n), whose nodes are numbered depth by depth.

    compress: equal prefixes are merged. Otherwise each becomes a node, but only the first of equal ones has children:
    the others cost time and change nothing.
    """
    batch, width, length = beams.shape
    match = prefix_match(beams)
    kept = match == torch.arange(width, device=beams.device)[:, None]  # (b, w, n)
    if not compress:
        kept = torch.ones_like(kept)
    number = kept.mT.flatten(1).cumsum(1).view(batch, length, width).mT  # from 1, where kept
    node = number.gather(1, match)
    parents = torch.nn.functional.pad(node[..., :-1], (1, 0))
    place = (number - 1).where(kept, width * length).flatten(1)  # the rest go to an extra place, which is cut off

    def placed(x: Tensor, empty: int) -> Tensor:
        room = torch.full((batch, width * length + 1), empty, dtype=x.dtype, device=x.device)
        return room.scatter(1, place, x.flatten(1))[:, :-1]

    return pack(placed(beams, 0), placed(parents, -1), placed(probability, 0))
