"""Falcon: one pass predicts the states of k tokens; the last k positions attend to each other (semi-autoregressive).

Position i reads (h_i, embedding of token i+1), through two layers of an LSTM that runs along the text and one decoder
layer in which the positions of a block attend to each other, and predicts h_{i+k}. The target's own `lm_head` computes
logits from that. So the last k positions of a text predict the next k states. The next pass reads these predictions and
the tokens that were chosen.

This follows the paper. The published code differs: it passes the LSTM's whole return value to the layer, and runs the
LSTM along the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from slipstream.errors import OptionError
from slipstream.heads.base import EMBEDDING, Head, Lender, Prediction, later
from slipstream.heads.blocks import Blocks, Masked, same_block
from slipstream.heads.decoder import Attend, Layer
from slipstream.heads.layer_config import LayerConfig, layer_sizes

MEMORY = 4  # vectors of the LSTM's state: hidden state and cell of each of its two layers
OUTPUT = 2  # the index of its output among them: the second layer's hidden state


@dataclass(frozen=True, kw_only=True)
class FalconConfig(LayerConfig):
    block: int  # tokens of a pass; published as k_mask
    bias: bool = True  # of the LSTM

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hidden_layers != 1:
            raise OptionError(f"a falcon head has one layer, not {self.num_hidden_layers}: deeper ones we don't run")


class Falcon(Head):
    kind = "falcon"
    config: FalconConfig

    def __init__(self, config: FalconConfig, borrowed: Iterable[str] = ()) -> None:
        super().__init__(config, borrowed)
        size = config.hidden_size
        self.add_embedding(size)
        self.lstm = nn.LSTM(2 * size, size, num_layers=2, bias=config.bias, batch_first=True)
        self.add_layers([Layer(config, width=size, reads=size)])

    @classmethod
    def fresh(
        cls, model: Any, *, block: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
    ) -> Self:
        """block: tokens of a pass; sizes: fields of FalconConfig."""
        size = Lender.of(model)
        fields = {**layer_sizes(model.config.get_text_config(), size.hidden_size), **sizes}
        config = FalconConfig(**size.sizes(), block=block, **fields)
        return cls.begin(config, cls.lendable(config), model, seed, dtype).bind(model)

    @classmethod
    def lendable(cls, config: FalconConfig) -> tuple[str, ...]:  # noqa: ARG003
        return (EMBEDDING,)

    @property
    def trained_depths(self) -> int:
        return self.config.block

    @property
    def decoder(self) -> Any:
        return self.decoders[0]

    def logits(self, features: Tensor) -> Tensor:
        """(…, H) -> (…, V)."""
        return self.lender.logits(features, bias=True)

    # ---- the LSTM

    def pairs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Tokens (…) and the states before them (…, H) -> (…, 2H), the LSTM's input."""
        return torch.cat((self.embed(tokens), features.to(self.dtype)), dim=-1)

    def along(self, pairs: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the LSTM over a whole text: (b, n, 2H), (b, 4, H) -> outputs (b, n, H), and the memory after it."""
        start = None
        if memory is not None:
            states, cells = (memory[:, part::2].transpose(0, 1).contiguous() for part in (0, 1))  # (2, b, H) each
            start = states, cells
        with _whole_precision(pairs):
            out, (states, cells) = self.lstm(pairs.to(self.dtype), start)
        return out, torch.stack((states[0], cells[0], states[1], cells[1]), dim=1)

    def step(self, pairs: Tensor, memory: Tensor) -> Tensor:
        """Run the LSTM over one token: (…, 2H), (…, 4, H) -> (…, 4, H), where OUTPUT is the output."""
        x, found = pairs.to(self.dtype).flatten(0, -2), list[Tensor]()
        with _whole_precision(pairs):
            for layer in range(2):
                before = [part.flatten(0, -2) for part in memory[..., 2 * layer : 2 * layer + 2, :].unbind(-2)]
                names = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.config.bias else ()))
                weights = [getattr(self.lstm, f"{name}_l{layer}") for name in names]
                found += torch.lstm_cell(x, before, *weights)
                x = found[-2]
        return torch.stack(found, dim=1).view(memory.shape)

    def no_memory(self, *shape: int) -> Tensor:
        """(…, 4, H), the memory before a text."""
        like = next(self.parameters())
        return torch.zeros(*shape, MEMORY, self.config.hidden_size, dtype=self.dtype, device=like.device)

    # ---- the layer

    def guess(self, x: Tensor, queries: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Outputs of the LSTM: (b, n, H) for keys only, (b, w, H) of the queries, at positions (b, n + w) -> (b, w, H)
        the states `block` positions later. `attend` gets the keys of both."""
        rest, h = self.decoder.carry(torch.cat((x, queries), dim=1), queries, positions, attend)
        return rest + h

    # ---- whole texts

    def blocks(self, states: Tensor, following: Tensor, tokens: Tensor, blocks: Blocks) -> Tensor:
        """The predictions of all blocks at once: states (b, t, H), the tokens after them as the head reads them (b, t),
        the true tokens (b, t) -> (b, count, depths, H). A block needs `config.block` states before its end."""
        k, device = self.config.block, tokens.device
        ends, text = blocks.ends(device), torch.arange(blocks.length, device=device)
        passes = -(-blocks.depths // k)
        x, memory = self._text(self.pairs(following, states), passes > 1)
        place = torch.arange(k, device=device)
        own = (ends[:, None] - k + 1 + place).clamp(min=0).flatten()  # (count·k,)
        before = (text <= ends[:, None]).repeat_interleave(k, 0)  # (count·k, t)
        attend, beside = Masked(), same_block(blocks.count, k, device)
        positions = torch.cat((text, own)).expand(len(tokens), -1)
        found = [self.guess(x, x[:, own], positions, attend.under(before)).unflatten(1, (-1, k))]
        chosen = blocks.following(tokens, 1 + (passes - 1) * k)[..., 1:]  # (b, count, ·)
        if memory is not None:
            memory = memory[:, ends]  # (b, count, 4, H)
        for n in range(passes - 1):
            assert memory is not None, "made for several passes"
            pairs = self.pairs(chosen[..., n * k : (n + 1) * k], found[-1])
            read, memory = self.steps(pairs, memory)  # (b, count, k, H)
            seen = torch.cat((before, *[beside] * (n + 1)), dim=1)
            at = (ends[:, None] + 1 + n * k + place).flatten().expand(len(tokens), -1)
            read = read.flatten(1, 2)
            found.append(self.guess(read[:, :0], read, at, attend.under(seen)).unflatten(1, (-1, k)))
        return torch.cat(found, dim=2)[:, :, : blocks.depths]

    def _text(self, pairs: Tensor, every: bool) -> tuple[Tensor, Tensor | None]:
        """(b, t, 2H) -> outputs (b, t, H). every: also the memory after each token, (b, t, 4, H)."""
        if not every:
            return self.along(pairs)[0], None
        memory, found = self.no_memory(len(pairs)), []
        for i in range(pairs.shape[1]):
            memory = self.step(pairs[:, i], memory)
            found.append(memory)
        each = torch.stack(found, dim=1)
        return each[:, :, OUTPUT], each

    def steps(self, pairs: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Run the LSTM over k tokens: (…, k, 2H), (…, 4, H) -> outputs (…, k, H), and the memory after them."""
        found = []
        for j in range(pairs.shape[-2]):
            memory = self.step(pairs[..., j, :], memory)
            found.append(memory[..., OUTPUT, :])
        return torch.stack(found, dim=-2), memory

    def predict(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Prediction]:
        """Predictions at the first `config.block` - 1 positions are meaningless, since a block has more positions."""
        self.check_depths(depths)
        features = self.blocks(states, later(tokens, 1), tokens, Blocks(tokens.shape[1], depths))
        for k in range(depths):
            yield Prediction(self.logits(features[:, :, k]), features[:, :, k])


def _whole_precision(x: Tensor) -> torch.autocast:
    """No autocast: rounding errors of an LSTM add up along a text, so it keeps its weights' precision in training."""
    return torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False)
