"""DFlash: a few layers predict a whole block at once, from the target's states at every position of the text.

Every layer computes keys and values of the text from the same features: some of the target's states, joined and normed.
A block is the root and mask tokens after it; its positions attend to the text and to each other. A mask predicts the
token at its own position; with `from_anchor`, as DeepSpec trains, the root predicts too, and each position predicts the
token after it.

DSpark adds two parts: a bias on the logits that depends on the previous token, so that the block's tokens depend on
each other, and a prediction of the probability that a token at this position is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from slipstream.errors import OptionError
from slipstream.heads.base import EMBEDDING, Lender, Prediction
from slipstream.heads.blocks import Blocks, Masked, same_block
from slipstream.heads.decoder import Attend, FurtherLayer, RMSNorm, add_norm
from slipstream.heads.layer_config import LayerConfig, layer_sizes
from slipstream.heads.layered import LayeredHead
from slipstream.heads.vocabulary import check_draft_ids

BIASES = ("vanilla", "gated", "rnn")
STATES = 5  # that a fresh head reads, as published ones do


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    block_size: int  # positions, including the root's
    mask_token_id: int
    aux_layers: tuple[int, ...]  # which states it reads, by transformers' numbers
    draft_vocab_size: int
    from_anchor: bool = False  # whether the root's position predicts too
    markov_rank: int | None = None  # of the bias; None: there is none
    markov_type: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False  # whether it reads the previous token's embedding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2:
            raise OptionError(f"a block of {self.block_size} has no place to guess: it must be 2 or more")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise OptionError(f"mask_token_id {self.mask_token_id} is no token: there are {self.vocab_size}")
        if not self.aux_layers:
            raise OptionError("a dflash head must read at least one hidden state")
        if self.markov_type not in BIASES:
            raise OptionError(f"the bias {self.markov_type!r} is unknown: there are {', '.join(BIASES)}")
        if self.confidence_with_markov and self.markov_rank is None:
            raise OptionError(
                "the confidence reads the embedding of the token before, and there is no bias to have one"
            )


class DFlash(LayeredHead):
    kind = "dflash"
    config: DFlashConfig

    def __init__(self, config: DFlashConfig, borrowed: Iterable[str] = ()) -> None:
        super().__init__(config, borrowed)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.add_embedding(size)
        self.fc = nn.Linear(len(config.aux_layers) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.add_layers(FurtherLayer(config, size) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.add_vocabulary(size)
        self.markov_head = None if config.markov_rank is None else Markov(config, config.markov_rank)
        if config.confidence:
            reads = size + (config.markov_rank or 0) * config.confidence_with_markov
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(reads, 1)})

    @classmethod
    def fresh(
        cls,
        model: Any,
        *,
        block: int = 8,
        layers: int = 2,
        bias: int = 0,
        confidence: bool = False,
        from_anchor: bool | None = None,
        draft_ids: Sequence[int] | Tensor | None = None,
        tied: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        **sizes: Any,
    ) -> Self:
        """block: positions of a block. bias: rank of the bias, 0: none. from_anchor: by default if there is a bias.
        draft_ids and tied as for eagle3; sizes: fields of DFlashConfig."""
        size, text = Lender.of(model), model.config.get_text_config()
        ids = check_draft_ids(draft_ids, size.vocab_size)
        config = DFlashConfig(
            **size.sizes(),
            **{
                **layer_sizes(text, size.hidden_size),
                "block_size": block,
                "num_hidden_layers": layers,
                "mask_token_id": spare_token(text),
                "aux_layers": spread_layers(size.layers, STATES),
                "draft_vocab_size": len(ids),
                "qk_norm": True,
                "from_anchor": bool(bias) if from_anchor is None else from_anchor,
                "markov_rank": bias or None,
                "confidence": confidence,
                "confidence_with_markov": confidence and bias > 0,
                **sizes,
            },
        )
        head = cls.begin(config, cls.lendable(config) if tied else (EMBEDDING,), model, seed, dtype)
        if head.markov_head is not None:  # the bias starts at 0
            head.markov_head.markov_w2.weight.data.zero_()
        head.start_vocabulary(model, ids)
        return head

    @property
    def reach(self) -> int:
        return self.config.block_size - (not self.config.from_anchor)

    # ---- a block

    def read(self, states: Tensor) -> Tensor:
        """(…, ·) as `join` returns them -> (…, H) features, the input of every layer's keys."""
        return self.hidden_norm(self.fc(states.to(self.dtype)))

    def block_of(self, roots: Tensor) -> Tensor:
        """(…) -> (…, positions) the root and masks."""
        masks = roots.new_full((*roots.shape, self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat((roots[..., None], masks), dim=-1)

    def remember(self, features: Tensor, positions: Tensor, attends: Sequence[Attend]) -> None:
        """Give the keys and values of a text's features (b, n, H) to the attentions. There are no queries."""
        for layer, attend in zip(self.decoders, attends, strict=True):
            layer.self_attn(features, positions, attend)

    def fill(self, tokens: Tensor, features: Tensor, positions: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Blocks' tokens (b, w) and features of new text (b, n, H), at positions (b, n + w) -> (b, w, H) after the last
        norm. attends: one for each layer; the last w positions are queries."""
        h, rest = self.embed(tokens), None
        for layer, attend in zip(self.decoders, attends, strict=True):
            if rest is None:
                normed = layer.input_layernorm(h)
            else:
                h, normed = add_norm(rest, h, layer.input_layernorm)
            rest, h = layer.carry(torch.cat((features, normed), dim=1), h, positions, attend)
        assert rest is not None, "there is a layer"
        return add_norm(rest, h, self.norm)[1]

    def guessing(self, states: Tensor, depths: int) -> Tensor:
        """(…, positions, H) -> (…, depths, H) the states of the positions that predict."""
        first = 0 if self.config.from_anchor else 1
        return states[..., first : first + depths, :]

    # ---- whole texts

    def hidden_blocks(self, states: Tensor, tokens: Tensor, blocks: Blocks) -> Tensor:
        """The blocks of texts, all at once: (b, t, ·), (b, t) -> (b, count, depths, H)."""
        ends, places = blocks.ends(tokens.device), self.config.block_size
        filled = self.block_of(blocks.following(tokens, 1)[..., 0])  # (b, count, places)
        text = torch.arange(blocks.length, device=tokens.device)
        spread = (ends[:, None] + 1 + torch.arange(places, device=tokens.device)).flatten()
        before = (text <= ends[:, None]).repeat_interleave(places, 0)
        mask = torch.cat((before, same_block(blocks.count, places, tokens.device)), dim=1)
        attends = [Masked().under(mask) for _ in self.decoders]
        positions = torch.cat((text, spread)).expand(len(tokens), -1)
        hidden = self.fill(filled.flatten(1), self.read(states), positions, attends)
        return self.guessing(hidden.unflatten(1, (blocks.count, places)), blocks.depths)

    def predict(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Prediction]:
        self.check_depths(depths)
        blocks = Blocks(tokens.shape[1], depths)
        hidden = self.hidden_blocks(states, tokens, blocks)
        latent = self.latents(hidden, blocks.following(tokens))
        for k in range(depths):
            yield Prediction(self.logits(hidden[:, :, k], None if latent is None else latent[:, :, k]))

    # ---- predictions

    def logits(self, hidden: Tensor, latent: Tensor | None = None) -> Tensor:
        """(…, H) -> (…, V'). latent (…, r): the bias's vector for the previous tokens."""
        out = self.output(hidden)
        return out if latent is None or self.markov_head is None else out + self.markov_head.markov_w2(latent)

    def latents(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """For whole blocks: (b, n, depths, H), the previous tokens (b, n, depths) -> (b, n, depths, r)."""
        if self.markov_head is None:
            return None
        memory, found = None, []
        for k in range(hidden.shape[2]):
            latent, memory = self.markov_head(hidden[:, :, k], before[:, :, k], memory)
            found.append(latent)
        return torch.stack(found, dim=2)

    def sure(self, hidden: Tensor, before: Tensor) -> Tensor:
        """(…, H), the previous tokens (…) -> (…) the logit of the probability of acceptance."""
        if self.config.confidence_with_markov and self.markov_head is not None:
            hidden = torch.cat((hidden, self.markov_head.markov_w1(before).to(hidden.dtype)), dim=-1)
        return self.confidence_head["proj"](hidden)[..., 0]


class Markov(nn.Module):
    """A vector for the previous token, which a matrix turns into a bias on the next token's logits."""

    def __init__(self, config: DFlashConfig, rank: int) -> None:
        super().__init__()
        self.rank, self.form = rank, config.markov_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.form == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif self.form == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)

    def forward(self, hidden: Tensor, before: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(…, H), (…), and (…, r) an rnn's state, None at the beginning of a block -> (…, r), and the next state."""
        token = self.markov_w1(before)
        if self.form == "vanilla":
            return token, None
        if self.form == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat((hidden, token), dim=-1))) * token, None
        memory = torch.zeros_like(token) if memory is None else memory
        keep, new, result = self.joint_proj(torch.cat((memory, token, hidden), dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(keep)
        return torch.tanh(result), keep * memory + (1 - keep) * torch.tanh(new)


def spread_layers(count: int, states: int) -> tuple[int, ...]:
    """The states of a target with `count` layers that a new head reads: as published, evenly spaced from the output of
    the second layer to that of the third last. Small targets have fewer."""
    first, last = min(2, count - 1), max(count - 2, count // 2)
    steps = max(states - 1, 1)
    return tuple(sorted({first + round(i * (last - first) / steps) for i in range(states)}))


def spare_token(text: Any) -> int:
    """The token that a new head uses as mask: padding, else the end of a text, else 0."""
    for name in ("pad_token_id", "eos_token_id"):
        found = getattr(text, name, None)
        found = found[0] if isinstance(found, list) else found
        if isinstance(found, int) and 0 <= found < text.vocab_size:
            return found
    return 0
