"""SPIRe: a draft made of the target's embedding, last layers and output matrix (arXiv 2504.06419).

A layer's keys of the text are computed from the target's hidden state at the input of the same layer. So the draft does
not read the text itself. It attends to the first and the latest tokens of the text only, so it has few keys.

    target   embedding ─ layer 0 … layer L-2 ─ layer L-1 ─ output      state L-2 of token t ─▶ keys of draft layer 0
    draft    embedding ─────────── layer L-2 ─ layer L-1 ─ output      state L-1 of token t ─▶ keys of draft layer 1

Drafted tokens have no target states. Their keys for later tokens are feedback memory: layer i's are computed from the
mixture m_i = Σ_l softmax_l(w_il) x_l of the token's streams x_0 (embedding) … x_n (last layer's output), so that a
layer's keys contain what higher layers computed. For itself, a token has its ordinary keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError, OptionError
from slipstream.heads.base import EMBEDDING, Lender, Prediction
from slipstream.heads.blocks import Blocks, Masked
from slipstream.heads.decoder import Attend, FurtherLayer, RMSNorm, add_norm
from slipstream.heads.layer_config import LayerConfig, layer_sizes
from slipstream.heads.layer_fields import layer_fields
from slipstream.heads.layered import LayeredHead
from slipstream.heads.target_layers import last_layers
from slipstream.heads.vocabulary import check_draft_ids
from slipstream.targets.trees import unwrapped

FEW = 4  # tokens on which layers are compared: within any sliding window
SHARE = 4  # a quarter of the target's layers, as published: 2 of 8, extrapolated to 20 of 80


@dataclass(frozen=True, kw_only=True)
class SpireConfig(LayerConfig):
    aux_layers: tuple[int, ...]  # the state that each layer's keys of the text come from, by transformers' numbers
    draft_vocab_size: int
    recent: int | None = 64  # how many of the text's latest tokens it attends to; None: all
    sinks: int = 1  # how many of its first tokens it attends to as well
    feedback: bool = True  # whether drafted tokens have feedback memory; else ordinary keys

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.aux_layers) != self.num_hidden_layers:
            raise OptionError(
                f"a spire head of {self.num_hidden_layers} layers reads as many states, not {len(self.aux_layers)}"
            )

    @property
    def kept(self) -> int | None:
        """The number of a text's tokens that have keys. None: all."""
        return None if self.recent is None else self.sinks + self.recent

    def column(self, index: Tensor) -> Tensor:
        """The columns of the keys of a text's tokens (…). New tokens overwrite those outside the window."""
        if self.recent is None:
            return index
        return torch.where(index < self.sinks, index, self.sinks + (index - self.sinks) % self.recent)

    def seen(self, index: Tensor, last: Tensor | int) -> Tensor:
        """Whether tokens with these indices are attended to after a text whose last index is `last`."""
        before = index <= last
        return before if self.recent is None else before & ((index < self.sinks) | (index > last - self.recent))


class Spire(LayeredHead):
    kind = "spire"
    config: SpireConfig

    def __init__(self, config: SpireConfig, borrowed: Iterable[str] = ()) -> None:
        super().__init__(config, borrowed)
        size, count = config.hidden_size, config.num_hidden_layers
        self.add_embedding(size)
        self.add_layers(FurtherLayer(config, size) for _ in range(count))
        self.norm = RMSNorm(size, config.rms_norm_eps)
        if config.feedback:
            self.feedback_weights = nn.Parameter(torch.zeros(count, count + 1))
        self.add_vocabulary(size)

    @classmethod
    def fresh(
        cls,
        model: Any,
        *,
        layers: int | None = None,
        window: int = 64,
        sinks: int = 1,
        feedback: bool = True,
        activations: bool = True,
        pruned: bool = True,
        draft_ids: Sequence[int] | Tensor | None = None,
        tied: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        **sizes: Any,
    ) -> Self:
        """layers: how many of the target's last ones, by default a quarter. window: how many of the latest tokens it
        attends to, 0: all. activations: keys of the text come from the target's states; else from token embeddings.
        pruned: start from the target's own layers; else from random ones. draft_ids and tied as for eagle3; sizes:
        fields of SpireConfig."""
        size, text = Lender.of(model), model.config.get_text_config()
        count = max(1, size.layers // SHARE) if layers is None else layers
        if not 1 <= count < size.layers:
            raise OptionError(f"layers={count}: of the target's {size.layers}, 1 to {size.layers - 1} can draft")
        if window < 0:
            raise OptionError(f"window={window} is out of range: a number of tokens, or 0 for all")
        ids, first = check_draft_ids(draft_ids, size.vocab_size), size.layers - count
        cut = last_layers(model, count) if pruned else {}
        fields = cut_fields(text, cut, count, size.name) if pruned else layer_sizes(text, size.hidden_size)
        config = SpireConfig(
            **size.sizes(),
            **{
                **fields,
                "num_hidden_layers": count,
                "aux_layers": tuple(range(first, size.layers)) if activations else (0,) * count,
                "draft_vocab_size": len(ids),
                "recent": window or None,
                "sinks": sinks,
                "feedback": feedback,
                **sizes,
            },
        )
        head = cls.begin(config, cls.lendable(config) if tied else (EMBEDDING,), model, seed, dtype)
        if feedback:  # equal shares of all streams
            head.feedback_weights.data.zero_()
        head.start_vocabulary(model, ids)
        if pruned:
            head.take_layers(model, cut)
        return head

    # ---- starting from the target's layers

    def take_layers(self, model: Any, cut: dict[str, Tensor]) -> None:
        """Start from the target's last layers. Raise if they compute something else than this head's layers."""
        layers: Any = self._modules["layers"]
        mine = {f"layers.{name}": tuple(tensor.shape) for name, tensor in layers.state_dict().items()}
        its = {name: tuple(tensor.shape) for name, tensor in cut.items()}
        if odd := sorted(name for name in mine.keys() | its.keys() if mine.get(name) != its.get(name)):
            raise _other_form(self.lender.name, f"they differ in {', '.join(odd[:3])}")
        layers.load_state_dict({name.removeprefix("layers."): tensor for name, tensor in cut.items()})
        off = self._distance(model)
        if not off <= 0.05:
            raise _other_form(self.lender.name, f"on a few tokens they are {off:.0%} off")

    @torch.no_grad()
    def _distance(self, model: Any) -> float:
        """Relative distance of its last states from the target's, with the target's inputs to these layers."""
        whole, first = unwrapped(model), self.lender.layers - self.config.num_hidden_layers
        ids = torch.arange(FEW, device=self.norm.weight.device)[None] % self.lender.vocab_size
        hidden = whole.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        causal = torch.ones(FEW, FEW, dtype=torch.bool, device=ids.device).tril()
        attends = [Masked().under(causal) for _ in self.decoders]
        _, mine = self.step(hidden[first].to(self.dtype), None, torch.arange(FEW, device=ids.device)[None], attends)
        its = hidden[self.lender.layers].to(self.dtype)
        return float((mine - its).norm() / its.norm())

    # ---- steps

    def read(self, states: Tensor) -> Sequence[Tensor]:
        """(…, ·) as `join` returns them -> for each layer (…, H), the input of its keys."""
        return states.to(self.dtype).chunk(self.config.num_hidden_layers, dim=-1)

    def remember(self, memory: Sequence[Tensor], positions: Tensor, attends: Sequence[Attend]) -> None:
        """Give the keys and values of each layer's memory (b, n, H) to the attentions. There are no queries."""
        for layer, known, attend in zip(self.decoders, memory, attends, strict=True):
            layer.self_attn(layer.input_layernorm(known), positions, attend)

    def step(
        self, x: Tensor, memory: Sequence[Tensor] | None, positions: Tensor, attends: Sequence[Attend]
    ) -> tuple[list[Tensor], Tensor]:
        """Embeddings (b, w, H) of the queries' tokens -> their streams (b, w, H), before each layer and after the last,
        and the last one after the norm. memory: inputs of the keys of new text, for each layer (b, n, H); then
        positions are those of n + w tokens."""
        streams, rest, h = [x], None, x
        for number, (layer, attend) in enumerate(zip(self.decoders, attends, strict=True)):
            if rest is None:
                normed = layer.input_layernorm(h)
            else:
                h, normed = add_norm(rest, h, layer.input_layernorm)
                streams.append(h)
            if memory is not None:
                normed = torch.cat((layer.input_layernorm(memory[number]), normed), dim=1)
            rest, h = layer.carry(normed, h, positions, attend)
        assert rest is not None, "there is a layer"
        last, normed = add_norm(rest, h, self.norm)
        return [*streams, last], normed

    def left(self, streams: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """The inputs of tokens' keys for later tokens, from their streams, for each layer (…, H). None: their ordinary
        keys, since there is no feedback memory."""
        if not self.config.feedback:
            return None
        shares = self.feedback_weights.float().softmax(-1).to(streams[0].dtype)  # (n, n + 1)
        return (shares @ torch.stack(list(streams), dim=-2)).unbind(-2)

    # ---- whole texts

    def hidden_blocks(self, states: Tensor, tokens: Tensor, blocks: Blocks) -> Tensor:
        """Teacher-forced drafts after the ends of all blocks at once: (b, t, ·), (b, t) -> (b, count, depths, H)."""
        ends, text = blocks.ends(tokens.device), torch.arange(blocks.length, device=tokens.device)
        seen = self.config.seen(text, ends[:, None])  # (count, keys so far)
        own = torch.eye(blocks.count, dtype=torch.bool, device=tokens.device)
        attends, batch = [Masked() for _ in self.decoders], len(tokens)

        def under(mask: Tensor) -> list[Masked]:
            return [attend.under(mask) for attend in attends]

        self.remember(self.read(states), text.expand(batch, -1), under(seen[:0]))
        found = []
        for depth, chosen in enumerate(blocks.following(tokens).unbind(2)):
            positions = (ends + 1 + depth).expand(batch, -1)
            streams, normed = self.step(self.embed(chosen), None, positions, under(torch.cat((seen, own), dim=1)))
            found.append(normed)
            left = self.left(streams)
            if left is not None:  # a token's ordinary keys are for itself only: hide them from now on
                seen = torch.cat((seen, torch.zeros_like(own)), dim=1)
                self.remember(left, positions, under(torch.cat((seen, own), dim=1)[:0]))
            seen = torch.cat((seen, own), dim=1)
        return torch.stack(found, dim=2)

    def predict(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Prediction]:
        self.check_depths(depths)
        hidden = self.hidden_blocks(states, tokens, Blocks(tokens.shape[1], depths))
        for k in range(depths):
            yield Prediction(self.output(hidden[:, :, k]))


def cut_fields(text: Any, cut: dict[str, Tensor], count: int, name: str) -> dict[str, Any]:
    """The fields of a LayerConfig for these tensors of a target with this config."""
    config = {key: value[-count:] if key == "layer_types" and value else value for key, value in text.to_dict().items()}
    try:
        # The target's sliding windows don't apply: this head has a window of its own.
        return {**layer_fields(config, cut, "layers.0."), "windows": ()}
    except (KeyError, TypeError, ValueError) as error:
        raise _other_form(name, f"its config: {error}") from error


def _other_form(name: str, why: str) -> ModelError:
    return ModelError(
        f"the layers of {name} have another form than Llama's, so a spire head can't begin with them ({why}): "
        "train one from random layers with --no-pruned"
    )
