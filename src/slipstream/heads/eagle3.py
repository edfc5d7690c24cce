"""EAGLE-3: a layer over three of the target's hidden states, with an output matrix and often a vocabulary of its own.

Its features need not resemble the target's states: it is trained unrolled, on its own predictions. Some heads read more
or fewer states, or have a second layer. EAGLE-3.1 norms each state separately, and its next depth reads features after
the last norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from slipstream.errors import DrafterError
from slipstream.heads.base import EMBEDDING, OUTPUT, Lender
from slipstream.heads.decoder import FeatureHead, FurtherLayer, Layer, RMSNorm
from slipstream.heads.layer_config import LayerConfig, layer_sizes
from slipstream.heads.target_layers import last_layers
from slipstream.heads.vocabulary import VocabularyHead, check_draft_ids
from slipstream.targets.states import final_norm

READING = {f"self_attn.{name}_proj.weight" for name in "qkv"}  # of a layer's input


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LayerConfig):
    width: int  # the head's own hidden size
    draft_vocab_size: int
    # Which states it reads, by transformers' numbers, except that the last layer's is read before the final norm. None:
    # by the published rule.
    aux_layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # one norm over all states it reads
    fc_norm: bool = False  # a norm for each of them
    norm_output: bool = False  # the next depth reads features after the last norm

    @property
    def states(self) -> int:
        """How many it reads."""
        return 3 if self.aux_layers is None else len(self.aux_layers)


class Eagle3(VocabularyHead, FeatureHead):
    kind = "eagle3"
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, borrowed: Iterable[str] = ()) -> None:
        super().__init__(config, borrowed)
        width, eps, reads = config.width, config.rms_norm_eps, config.states * config.hidden_size
        self.norm_output = config.norm_output
        self.add_embedding(width)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(reads, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, eps) for _ in range(config.states))
        self.fc = nn.Linear(reads, width, bias=False)
        self.midlayer = _MidLayer(config)
        if config.num_hidden_layers > 1:  # published as `layers.1.…`; as an attribute that name is a method
            above = range(1, config.num_hidden_layers)
            self._modules["layers"] = nn.ModuleDict({str(n): FurtherLayer(config, width) for n in above})
        self.norm = RMSNorm(width, eps)
        self.add_vocabulary(width)

    @classmethod
    def fresh(
        cls,
        model: Any,
        *,
        draft_ids: Sequence[int] | Tensor | None = None,
        tied: bool = True,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        **sizes: Any,
    ) -> Self:
        """draft_ids: its vocabulary, by default all tokens. tied: its output matrix is the target's rows for these, and
        is not trained; otherwise it starts as a copy of them. sizes: fields of Eagle3Config."""
        size = Lender.of(model)
        ids = check_draft_ids(draft_ids, size.vocab_size)
        count = size.layers
        config = Eagle3Config(
            **size.sizes(),
            width=size.hidden_size,
            draft_vocab_size=len(ids),
            **{
                "aux_layers": None if count >= 6 else (count // 4, count // 2, count - 1),  # the rule needs 6 layers
                **layer_sizes(model.config.get_text_config(), size.hidden_size),
                **sizes,
            },
        )
        head = cls.begin(config, cls.lendable(config) if tied else (EMBEDDING,), model, seed, dtype)
        head.start_vocabulary(model, ids)
        head.start_layer(model)
        return head

    @torch.no_grad()
    def start_layer(self, model: Any) -> None:
        """Start from the target's last layer, which reads the last of the states unchanged: the loss then falls faster
        at first. Where that layer has another form than Llama's, all stays random."""
        size, act = self.config.hidden_size, getattr(model.config.get_text_config(), "hidden_act", None)
        if self.config.width != size or act != self.config.hidden_act:
            return
        mine, cut = self.midlayer.state_dict(), last_layers(model, 1)
        its = {name.removeprefix("layers.0."): value for name, value in cut.items() if not name.endswith(".bias")}
        its["hidden_norm.weight"] = its.pop("input_layernorm.weight", torch.empty(0))
        for name in READING & its.keys():  # of the embedding, beside the features, it knows nothing yet
            if its[name].shape == (len(mine[name]), size):
                its[name] = torch.cat((mine[name][:, :size], its[name].to(mine[name])), 1)
        shapes = {name: value.shape for name, value in mine.items() if name != "input_layernorm.weight"}
        if shapes != {name: value.shape for name, value in its.items()}:
            return
        self.midlayer.load_state_dict(its, strict=False)
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)

    @classmethod
    def lendable(cls, config: Eagle3Config) -> tuple[str, ...]:
        return (EMBEDDING, OUTPUT) if config.width == config.hidden_size else ()

    def bind(self, model: Any) -> Self:
        super().bind(model)
        count = self.lender.layers
        if max(self.aux_ids(count)) > count:
            raise DrafterError(
                f"this eagle3 head reads hidden states {self.config.aux_layers}, but {self.lender.name} has "
                f"{count} layers: use it with the model it was trained for"
            )
        if count in self.aux_ids(count) and final_norm(model) is None:
            raise DrafterError(
                f"this eagle3 head reads the last layer's state before the final norm, and {self.lender.name} has no "
                "norm that slipstream finds: use another head"
            )
        return self

    def layers(self, count: int) -> tuple[int, ...]:
        return tuple(count + 1 if number == count else number for number in self.aux_ids(count))

    def aux_ids(self, count: int) -> tuple[int, ...]:
        """Like `layers`, with the numbers of its config."""
        if self.config.aux_layers is not None:
            return self.config.aux_layers
        if count < 6:
            raise DrafterError(
                f"an eagle3 head reads hidden states 2, {count // 2} and {count - 3} of a target with {count} layers "
                "unless its config names others (eagle_aux_hidden_state_layer_ids): below six layers it must"
            )
        return (2, count // 2, count - 3)

    def join(self, hidden: Mapping[int, Tensor]) -> Tensor:
        if self._lender is not None:
            which = self.layers(self._lender.layers)
        else:
            which = self.config.aux_layers or tuple(sorted(hidden))
        if len(which) != self.config.states or not set(which) <= set(hidden):
            raise DrafterError(
                f"this eagle3 head reads {self.config.states} hidden states, {which}, but got {sorted(hidden)}"
            )
        return torch.cat([hidden[layer] for layer in which], dim=-1)

    def read(self, states: Tensor) -> Tensor:
        x = states.to(self.dtype)
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        if self.config.fc_norm:
            each = zip(self.fc_norm, x.chunk(self.config.states, dim=-1), strict=True)
            x = torch.cat([norm(state) for norm, state in each], dim=-1)
        return self.fc(x)

    @property
    def decoder(self) -> _MidLayer:
        return self.midlayer

    @property
    def further(self) -> list[Any]:
        layers: Any = self._modules.get("layers")
        return [] if layers is None else list(layers.values())

    @property
    def last_norm(self) -> RMSNorm:
        return self.norm

    def enter(self, tokens: Tensor, features: Tensor, chain: Tensor | None) -> tuple[Tensor, Tensor]:
        norms = (self.midlayer.input_layernorm, self.midlayer.hidden_norm)
        x, features = self.side_by_side(tokens, features, chain, norms)
        return x, x[..., self.config.width :] if self.config.norm_before_residual else features


class _MidLayer(Layer):
    """A layer whose attention reads embedding and features, concatenated, each after a norm of its own."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, width=config.width, reads=2 * config.width)
        self.hidden_norm = RMSNorm(config.width, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.width, config.rms_norm_eps)
