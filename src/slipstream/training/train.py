"""train: train a head for a target on texts that the target wrote, into a folder with the log of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import OptionError
from slipstream.heads import HEADS, load_head, save_head
from slipstream.heads.base import Head, Lender
from slipstream.heads.ranks import save_tree, tune
from slipstream.heads.redrafter import ReDrafter
from slipstream.training import checkpoint, recipes
from slipstream.training.data import Texts, read_texts
from slipstream.training.log import Log
from slipstream.training.loop import Loop, Steps, TrainingPlan, Watch
from slipstream.training.losses import LABELS, Weights
from slipstream.training.processes import Processes
from slipstream.training.teacher import Teacher

STATIC = ("medusa", "eagle")  # heads that can draft along a static tree
TREE_NODES = 64

DRAFT_VOCAB = {"eagle3": 8192, "redrafter": 12288, "dflash": 8192}


@dataclass(frozen=True)
class Lesson:
    """The kind of head, its loss, and the texts to train on."""

    head: str  # its kind
    hass: bool = False  # only for eagle
    labels: str | None = None  # distill, hard, tv or overlap; None: the recipe's
    depths: int | None = None  # predicted in training; None: the recipe's
    decay: float = 0.8  # the weight of a depth, relative to the depth before
    length: int = 1024  # tokens of a text at most
    count_all: bool = False  # also count tokens that the target only read
    any_author: bool = False  # also accept texts that another model wrote

    def __post_init__(self) -> None:
        recipes.find(self.head, self.hass)
        if self.labels is not None and self.labels not in LABELS:
            raise OptionError(
                f"labels={self.labels!r} is unknown: distill learns the target's distribution, hard the data, tv to be "
                "accepted, overlap half of the first and half of that"
            )
        if not 0 < self.decay <= 1:
            raise OptionError(f"decay={self.decay} is out of range: more than 0, and 1 at most")


@dataclass(frozen=True)
class Trained:
    accuracy: list[float]  # on held-out texts, at t+1, t+2, …
    steps: int
    seconds: float
    parameters: int


def train(
    model: Any,
    data: Sequence[Path],
    folder: Path,
    lesson: Lesson,
    plan: TrainingPlan,
    sizes: dict[str, Any] | None = None,
    *,
    start: str | Path | None = None,
    resume: bool = False,
    processes: Processes | None = None,
    watch: Watch | None = None,
) -> Trained:
    """Train a head for a transformers model on files that `collect` wrote, into a new folder, in the model's precision.

    sizes are passed to the head's `fresh`, except draft_vocab: how many of the data's most frequent tokens eagle3,
    dflash and spire can predict, and redrafter when it drafts greedily. start: a head to start from instead of a new
    one; it keeps its sizes, except that a redrafter may get more layers and the likely tokens of this data. resume: go
    on from the folder's checkpoint.
    """
    processes = processes or Processes(str(model.device))
    checkpoint.check_folder(folder, resume)
    processes.wait()  # the first process creates the folder after all have checked it
    name, vocabulary = Lender.of(model).name, Lender.of(model).vocab_size
    author = None if lesson.any_author else name
    texts, held_out = read_texts(data, vocabulary, author, lesson.length, lesson.count_all)
    sizes = dict(sizes or {})
    default = {"draft_vocab": DRAFT_VOCAB[lesson.head]} if lesson.head in DRAFT_VOCAB else {}
    likely = frequent(texts, {**default, **sizes}.get("draft_vocab"), vocabulary)
    if start is not None:
        head = start_from(start, model, lesson, sizes)
        sizes = {"start": str(start), **(default if isinstance(head, ReDrafter) else {}), **sizes}
    else:
        sizes = {**default, **sizes}
        head = make_head(model, lesson, plan.seed, sizes, likely)
    recipe = recipes.find(lesson.head, lesson.hass)
    depths = lesson.depths or recipe.depths_for(head)
    head.check_depths(depths)

    weights = Weights(recipe, lesson.decay, LABELS[lesson.labels or recipe.labels])
    loop = Loop(head, Teacher(model, head), weights, depths, texts, held_out, plan, processes)
    setup = {
        "model": name,
        "dtype": str(model.dtype),
        "data": texts.fingerprint(),
        **asdict(lesson),
        **sizes,
        **plan.fixed(),
        "batches_per_step": processes.count * plan.accumulate,
    }
    run(loop, folder, setup, lambda: save_head(head, folder, dtype=model.dtype), resume, watch)
    if processes.rank == 0:
        if isinstance(head, ReDrafter):
            head.guess_only(likely)
        save_head(head, folder, dtype=model.dtype)
        if lesson.head in STATIC and (ranks := loop.ranks()):
            save_tree(tune(ranks, TREE_NODES), folder)
        checkpoint.remove(folder)
    processes.wait()
    return Trained(loop.accuracy, loop.step, loop.seconds, sum(p.numel() for p in loop.parameters))


def run(
    loop: Steps, folder: Path, setup: dict[str, Any], save: Callable[[], None], resume: bool, watch: Watch | None
) -> None:
    """Run all steps, with their log in the folder. resume: go on from its checkpoint, which must have this setup."""
    if resume:
        loop.restore(checkpoint.load(folder, setup))
    log = None
    if loop.processes.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        log = Log(folder, loop.step)
    loop.processes.wait()
    try:
        loop.run(folder, log, setup, save, watch or (lambda *_: None))
    finally:
        if log is not None:
            log.close()


def start_from(start: str | Path, model: Any, lesson: Lesson, sizes: dict[str, Any]) -> Head:
    head = load_head(start, model, torch.float32)
    if head.kind != lesson.head:
        raise OptionError(f"{start} is of the kind {head.kind}: train {head.kind}, or start from a {lesson.head}")
    fixed = set(sizes) - ({"layers", "draft_vocab"} if isinstance(head, ReDrafter) else set())
    if fixed:
        raise OptionError(
            f"{', '.join(sorted(fixed))} can't be chosen for a head that is there already: leave --start or them out"
        )
    if isinstance(head, ReDrafter) and "layers" in sizes:
        head.deepen(sizes["layers"])
    return head


def frequent(texts: Texts, size: int | None, vocabulary: int) -> torch.Tensor | None:
    """(size,) the ids of the most frequent tokens. None: all."""
    if size is not None and size < 1:
        raise OptionError(f"draft_vocab={size} is out of range: at least one token must be left to guess")
    if size is None or size >= vocabulary:
        return None
    return torch.from_numpy(texts.frequent(size, vocabulary))


def make_head(model: Any, lesson: Lesson, seed: int, sizes: dict[str, Any], likely: torch.Tensor | None) -> Head:
    own = {name: size for name, size in sizes.items() if name != "draft_vocab"}
    if lesson.head in ("eagle3", "dflash", "spire"):
        own["draft_ids"] = likely
    fresh: Any = HEADS[lesson.head]
    return fresh.fresh(model, seed=seed, **own)
