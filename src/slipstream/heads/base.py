"""Head: a small module trained to predict, from the target's hidden states, the tokens after its next one.

The target has read tokens 0..i; its state h_i (`hidden_states[L]` of transformers: after the final norm, the input of
`lm_head`) chose token i+1, the root. A head predicts tokens i+2, i+3, …: depth k predicts token i+2+k.

Parameters have the names of the published checkpoints, so `state_dict()` is the published layout without the tensors
that the head borrows from its target. Caches, trees and files are no concern of a head.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.errors import DrafterError, OptionError
from slipstream.kernels.ops import linear

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"  # as all published layouts call them
FEW_ROWS = 64


@dataclass(frozen=True)
class Prediction:
    """The predictions of one depth at every position."""

    logits: Tensor  # (b, t, V') over the head's own vocabulary
    features: Tensor | None = None  # (b, t, H) EAGLE: the predicted state, which the next depth reads


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The sizes that every head has."""

    vocab_size: int  # the target's
    hidden_size: int  # the target's
    target_layers: int | None = None  # the target's; None: the files don't say
    target: str | None = None  # its name

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is int and value < 1 and not field.name.endswith("_id"):
                raise OptionError(f"{field.name} of a head must be 1 or more, not {value}")


@dataclass(frozen=True)
class Lender:
    """What a head borrows from its target. Not a module, so that none of it becomes part of the head."""

    name: str
    architectures: tuple[str, ...]
    embedding: nn.Module
    lm_head: nn.Module
    scale: float  # some targets multiply their logits by a constant. A cap on logits changes no order: it is ignored
    vocab_size: int
    hidden_size: int
    layers: int

    @classmethod
    def of(cls, model: Any) -> Lender:
        text = model.config.get_text_config()
        name = getattr(model.config, "_name_or_path", "") or type(model).__name__
        embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        if embedding is None or lm_head is None:
            raise DrafterError(f"{name} has no language-modelling head, which every trained head needs")
        if (reads := getattr(lm_head, "in_features", text.hidden_size)) != text.hidden_size:
            raise DrafterError(f"{name} has states of size {text.hidden_size} but an lm_head that reads {reads}")
        return cls(
            name=name,
            architectures=tuple(getattr(model.config, "architectures", None) or (type(model).__name__,)),
            embedding=embedding,
            lm_head=lm_head,
            scale=float(getattr(text, "logit_scale", None) or 1 / (getattr(text, "logits_scaling", None) or 1)),
            vocab_size=int(getattr(lm_head, "out_features", text.vocab_size)),
            hidden_size=int(text.hidden_size),
            layers=int(text.num_hidden_layers),
        )

    def sizes(self) -> dict[str, Any]:
        """The fields of a HeadConfig."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "target_layers": self.layers,
            "target": self.name,
        }

    def logits(self, x: Tensor, bias: bool = False) -> Tensor:
        """(…, H) -> (…, V). Gradients reach x, but are not stored for the target's own weights.

        bias: add the target's bias, if it has one. Published layouts have no place for a bias, so a head that may hold
        its own output matrix uses none.
        """
        head = self.lm_head
        if type(head) is nn.Linear:
            shift = head.bias.detach() if bias and head.bias is not None else None
            out = product(x.to(head.weight.dtype), head.weight.detach(), shift)
        else:  # quantised, or an adapter's
            out = head(x)
        return out if self.scale == 1 else out * self.scale

    def table(self) -> Tensor:
        """(V, H) the embedding of every token, including what the target's module does to it, such as scaling."""
        weight: Any = self.embedding.weight
        if type(self.embedding) is nn.Embedding:
            return weight.detach()
        with torch.no_grad():
            return self.embedding(torch.arange(self.vocab_size, device=weight.device))

    def matrix(self) -> Tensor:
        """(V, H) the output matrix as a plain tensor, as the published layouts hold it."""
        head = self.lm_head
        if type(head) is not nn.Linear:
            raise DrafterError(
                f"the output matrix of {self.name} is a {type(head).__name__}, whose values can't be copied: "
                "load the target without quantisation or adapters"
            )
        return head.weight.detach() if self.scale == 1 else head.weight.detach() * self.scale


class Head(nn.Module, ABC):
    """A trained head. `borrowed` names the tensors of its layout that are its target's, not its own."""

    kind: ClassVar[str]
    config: Any

    def __init__(self, config: Any, borrowed: Iterable[str] = ()) -> None:
        super().__init__()
        self.config = config
        self.borrowed = frozenset(borrowed)
        self._lender: Lender | None = None
        if unknown := sorted(self.borrowed - set(self.lendable(config))):
            raise DrafterError(f"a {self.kind} head can't share {', '.join(unknown)} with its target")

    # ---- the target

    def bind(self, model: Any) -> Self:
        """Check that this is the right target, and borrow its tensors."""
        lender = Lender.of(model)
        for what, mine, its in (
            ("a hidden size of {}", self.config.hidden_size, lender.hidden_size),
            ("a vocabulary of {}", self.config.vocab_size, lender.vocab_size),
            ("{} layers", self.config.target_layers, lender.layers),
        ):
            if mine is not None and mine != its:
                raise DrafterError(
                    f"this {self.kind} head was made for a target with {what.format(mine)}, "
                    f"but {lender.name} has {its}: use it with the model it was trained for"
                )
        self._lender = lender
        self.config = replace(self.config, target_layers=lender.layers, target=self.config.target or lender.name)
        return self

    @property
    def bound(self) -> bool:
        return self._lender is not None

    @property
    def lender(self) -> Lender:
        if self._lender is None:
            raise DrafterError(f"this {self.kind} head borrows from its target: call bind(model) first")
        return self._lender

    @property
    def embedding(self) -> nn.Module | None:
        """Its token embeddings: its own or the target's. None: it uses none, or isn't bound."""
        own = self._modules.get("embed_tokens")
        return own if own is not None or self._lender is None else self._lender.embedding

    def embed(self, tokens: Tensor) -> Tensor:
        """(…) -> (…, H). Embeddings are never trained with a head."""
        embedding = self.embedding
        if embedding is None:
            embedding = self.lender.embedding
        with torch.no_grad():
            return embedding(tokens).to(self.dtype)

    @classmethod
    def lendable(cls, config: Any) -> tuple[str, ...]:  # noqa: ARG003
        """The tensors of its layout that may be borrowed from the target."""
        return ()

    def lent(self, name: str) -> Tensor:
        """The bound target's tensor for one that may be borrowed."""
        if name != EMBEDDING:
            raise NotImplementedError(f"{self.kind} shares no {name}")
        return self.lender.table()

    def refresh(self) -> None:
        """Recompute what is derived from weights, after these were changed in place."""

    # ---- parts that several kinds have

    def add_embedding(self, width: int) -> None:
        """An embedding of its own, unless that is borrowed."""
        if EMBEDDING not in self.borrowed:
            self.embed_tokens = nn.Embedding(self.config.vocab_size, width).requires_grad_(False)

    def add_layers(self, layers: Iterable[nn.Module]) -> None:
        """Published as `layers.0.…`. Not set as an attribute, since `layers` is a method."""
        self._modules["layers"] = nn.ModuleList(layers)

    @property
    def decoders(self) -> list[Any]:
        """The layers that were added."""
        layers: Any = self._modules["layers"]
        return list(layers)

    # ---- predicting

    @property
    def draft_ids(self) -> Tensor | None:
        """(V',) the target's token id of each of the head's own ids. None: they are the same."""
        return None

    @property
    def reach(self) -> int | None:
        """How many depths it can predict. None: any number."""
        return None

    @property
    def trained_depths(self) -> int | None:
        """How many depths it is trained on if the recipe names no number. None: the default of recipes."""
        return self.reach

    def layers(self, count: int) -> tuple[int, ...]:
        """Which hidden states of a target with `count` layers it reads, as transformers numbers them."""
        return (count,)

    def join(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The states it reads, side by side: (…, H), or (…, 3H) for eagle3."""
        (state,) = hidden.values()
        return state

    @abstractmethod
    def predict(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Prediction]:
        """Teacher-forced predictions at all positions at once. states (b, t, ·) = join(hidden), tokens (b, t).

        The k-th Prediction at position i is for token i+2+k, given the true tokens up to i+1+k. Beyond the end of a
        row, tokens wrap around to its beginning: the caller must mask the predictions there.
        """

    # ---- making

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    @classmethod
    @abstractmethod
    def fresh(cls, model: Any, *args: Any, **sizes: Any) -> Self:
        """A bound head for this model (a transformers causal LM), ready to be trained. Sizes have defaults; so do
        `seed` (0) and `dtype` (float32)."""

    @classmethod
    def blank(cls, config: Any, borrowed: Iterable[str] = ()) -> Self:
        """A head whose parameters have shapes but no values."""
        with torch.device("meta"):
            return cls(config, borrowed)

    @classmethod
    def begin(
        cls, config: Any, borrowed: Iterable[str], model: Any, seed: int, dtype: torch.dtype = torch.float32
    ) -> Self:
        """An unbound head on the model's device, with random values that depend on the seed alone."""
        head = cls.blank(config, borrowed)
        head.to(dtype).to_empty(device=model.get_output_embeddings().weight.device)
        random = torch.Generator().manual_seed(seed)
        for module in head.modules():
            for name, value in module.named_parameters(recurse=False):
                if value.ndim == 2:
                    bound = 1 / math.sqrt(value.shape[1])
                    value.data.copy_(torch.empty(value.shape).uniform_(-bound, bound, generator=random))
                else:
                    value.data.fill_(0.0 if name.startswith("bias") else 1.0)  # an LSTM's biases have longer names
        return head

    def check_depths(self, depths: int) -> None:
        if depths < 1 or (self.reach is not None and depths > self.reach):
            most = "1 or more" if self.reach is None else f"1 to {self.reach}"
            raise OptionError(f"this {self.kind} head guesses {most} tokens ahead, not {depths}")


class Unrolled(NamedTuple):
    """The predictions of one depth at every position, before the output matrix."""

    inputs: tuple[Tensor, ...]  # each (b, t, ·)
    read: Callable[..., Tensor]  # the same rows of each input, (…, ·) -> (…, V') logits


class UnrolledHead(Head):
    """A head that predicts depth by depth, at every position of a text at once."""

    @abstractmethod
    def unroll(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Unrolled]:
        """Like `predict`, but without logits: training computes these for few positions at a time."""

    def predict(self, states: Tensor, tokens: Tensor, depths: int) -> Iterator[Prediction]:
        self.check_depths(depths)
        for inputs, read in self.unroll(states, tokens, depths):
            yield Prediction(read(*inputs))


class Residual(nn.Module):
    """x + silu(linear(x)): the block of Medusa and of ReDrafter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        if by_kernels(x):
            from slipstream.heads.layer_kernel import add_silu

            return add_silu(x, self.linear(x), None, None)
        return x + functional.silu(self.linear(x))


def by_kernels(x: Tensor) -> bool:
    """Whether kernels (`layer_kernel.py`) compute what lies between matrix products: on a GPU, in half precision,
    without gradients, which the kernels don't support."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and not torch.is_grad_enabled()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(…, K), (N, K), (N,) -> (…, N). Few rows, as in a draft, go through the kernel that overlaps with others."""
    few = x.numel() <= FEW_ROWS * x.shape[-1]
    return linear(x, weight, bias) if few and by_kernels(x) else functional.linear(x, weight, bias)


def follow(x: Tensor, chain: Tensor | None) -> Tensor:
    """(b, w, H) -> (b, w', H), the rows with these indices (b, w'). None: all, unchanged."""
    return x if chain is None else x.take_along_dim(chain[..., None], 1)


def later(tokens: Tensor, by: int) -> Tensor:
    """(b, t) the token `by` positions later; at the end of a row they wrap around to its beginning."""
    return tokens.roll(-by, dims=1)
