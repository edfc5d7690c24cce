"""The training loop: batches through the frozen target, predictions, gradients, optimiser steps, and evaluations.

`Steps` counts, times, logs and saves, for any kind of model that is trained; `Loop` has the steps of a head. The host
waits for the device only when a line is logged; with a share below 1, after every step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from slipstream.errors import OptionError
from slipstream.heads.base import Head
from slipstream.heads.ranks import measure
from slipstream.training import checkpoint
from slipstream.training.data import Batch, Order, Texts, cut
from slipstream.training.glancing import Practice
from slipstream.training.log import Log
from slipstream.training.losses import Weights, backward, hits
from slipstream.training.processes import Processes
from slipstream.training.teacher import Teacher

Watch = Callable[[int, float, dict[str, Any]], None]  # step, total steps (0: not known yet), a line of the log or {}
DEPTHS = 5  # depths for which accuracy is reported
MEASURED = 16  # texts shorter than this are left out when ranks are measured
# The fields of a plan that may change when a run is resumed.
FREE = ("steps", "epochs", "minutes", "share", "log_every", "eval_every", "save_every", "accumulate")
_HELD_OUT = 256  # texts of an evaluation, at most


@dataclass(frozen=True)
class TrainingPlan:
    """How long to train, and with which steps. Exactly one of steps, epochs and minutes is set."""

    steps: int | None = None
    epochs: int | None = None
    minutes: float | None = None
    batch_tokens: int = 16384  # of a batch, padding included
    accumulate: int = 1  # batches per step
    rate: float = 1e-3  # the highest learning rate
    warmup: int = 50  # steps until it is reached
    clip: float = 1.0  # the largest norm of a gradient
    seed: int = 0  # of the order of the texts
    share: float = 1.0  # share of the time that training may use; it pauses for the rest
    log_every: int = 20  # steps
    eval_every: int = 500
    save_every: int = 1000

    def __post_init__(self) -> None:
        given = [name for name in ("steps", "epochs", "minutes") if getattr(self, name) is not None]
        if len(given) != 1:
            raise OptionError(f"{', '.join(given) or 'nothing'} was given: say one of steps, epochs and minutes")
        for name in (*given, "batch_tokens", "accumulate", "rate", "clip", "log_every", "eval_every", "save_every"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)} is out of range: it must be more than 0")
        if self.warmup < 0:
            raise OptionError(f"warmup={self.warmup} is out of range: 0 begins with the full rate")
        check_share(self.share)

    def fixed(self) -> dict[str, Any]:
        """The fields that must be the same when a run is resumed."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}

    def rate_at(self, step: int, total: float) -> float:
        """Linear warm-up, over a tenth of the run at most, then half a cosine down to 0."""
        warmup = min(self.warmup, total / 10)
        if step < warmup:
            return self.rate * min(1.0, (step + 1) / warmup)
        done = min(1.0, (step - warmup) / max(1.0, total - warmup))
        return self.rate * 0.5 * (1 + math.cos(math.pi * done))


def check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise OptionError(f"share={share} is out of range: more than 0, and 1 at most, which pauses never")


def pause(worked: float, share: float) -> None:
    """Sleep after so many seconds of work, so that work takes only this share of the time."""
    if share < 1:
        sleep(worked * (1 / share - 1))


class Steps(ABC):
    """The steps of a training run. Subclasses define the gradient of a batch and the evaluation."""

    def __init__(
        self,
        learner: nn.Module,
        device: torch.device,
        texts: Texts,
        held_out: Texts,
        plan: TrainingPlan,
        processes: Processes,
    ) -> None:
        self.learner, self.device, self.texts, self.held_out = learner, device, texts, held_out
        self.plan, self.processes = plan, processes
        self.order = Order(texts, plan.batch_tokens, plan.seed)
        self.parameters = [p for p in learner.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(
            self.parameters, lr=plan.rate, betas=(0.9, 0.95), fused=device.type == "cuda"
        )
        self.step = 0
        self.seconds = 0.0  # of this run, including the part before it was resumed
        self.accuracy: list[float] = []
        self._loss = torch.zeros((), device=device)  # sum since the last line of the log
        self._logged = (0, 0.0)  # the step and the seconds of that line
        self._tokens = 0  # since that line
        self._evaluation = 0.0  # seconds of the last evaluation
        share = processes.count * plan.accumulate
        self.total = float(plan.steps or 0)
        if plan.epochs is not None:
            self.total = float(-(-self.order.until(plan.epochs) // share))

    @abstractmethod
    def learn(self, texts: NDArray[np.int64], guesses: int) -> torch.Tensor:
        """Add the gradient of a batch's loss to the parameters, and return the loss (a scalar). guesses: the number of
        counted tokens in all batches of the step; the loss is divided by it."""

    @abstractmethod
    def measured(self) -> dict[str, list[float]]:
        """Results on held-out texts, each a list by depth: `accuracy`, and others if there are any."""

    def run(self, folder: Path, log: Log | None, setup: dict[str, Any], save: Callable[[], None], watch: Watch) -> None:
        """Train to the end. `save` writes the head; the checkpoint next to it includes the `setup`. Only the first
        process has a log and writes files. If `watch` raises KeyboardInterrupt, a checkpoint is saved first."""
        plan, begun = self.plan, perf_counter() - self.seconds
        watch(self.step, self.total, {})
        while not self.total or self.step < self.total:
            if plan.share < 1:
                self._step_and_pause()
            else:
                self.train_step()
            line: dict[str, Any] = {}
            # Also at powers of two, so that the total of a run in minutes is estimated early on a slow machine.
            if self.step % plan.log_every == 0 or (self.step < plan.log_every and self.step & (self.step - 1) == 0):
                line = self._tell(begun, log, self.step % plan.log_every == 0)
            if self.step % plan.eval_every == 0 and self.step < self.total:
                line |= self._evaluate(begun, log)
            self.seconds = perf_counter() - begun
            if self.step % plan.save_every == 0 and self.step < self.total:
                self.save(folder, setup, save)
            try:
                watch(self.step, self.total, line)
            except KeyboardInterrupt:
                self.save(folder, setup, save)
                raise
        line = self._evaluate(begun, log)
        self.seconds = perf_counter() - begun
        self.save(folder, setup, save)  # from now on an interrupt does not wait
        watch(self.step, self.total, line)

    def _step_and_pause(self) -> None:
        clock = perf_counter()
        self.train_step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        pause(perf_counter() - clock, self.plan.share)

    def save(self, folder: Path, setup: dict[str, Any], save: Callable[[], None]) -> None:
        # The log needs the sum of all processes' losses: the first process keeps it, the others start from 0.
        loss = self.processes.sum(self._loss.clone())
        self._loss = loss if self.processes.rank == 0 else torch.zeros_like(loss)
        if self.processes.rank == 0:
            save()
            state = {
                "setup": setup,
                "head": self.learner.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "step": self.step,
                "seconds": self.seconds,
                "total": self.total,
                "since": [self._logged[0], self._logged[1], self._tokens],
                "loss": self._loss,
            }
            checkpoint.save(folder, state)
        self.processes.wait()

    def restore(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state["head"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]
        if self.plan.minutes is not None:
            self.total = state["total"]
        step, seconds, self._tokens = state["since"]
        self._logged = (step, seconds)
        if self.processes.rank == 0:
            self._loss = state["loss"].to(self._loss.device)

    def train_step(self) -> None:
        """One step of the optimiser: `accumulate` batches in each process, weighted as if they were one."""
        plan, processes = self.plan, self.processes
        share = processes.count * plan.accumulate
        together = [self.order[place] for place in range(self.step * share, (self.step + 1) * share)]
        guesses = int(sum(self.texts.guesses[texts].sum() for texts in together))
        for texts in together[processes.rank :: processes.count]:
            self._loss += self.learn(texts, guesses)
        self._tokens += int(sum(self.texts.lengths[texts].sum() for texts in together))
        processes.sum_gradients(self.parameters)
        torch.nn.utils.clip_grad_norm_(self.parameters, plan.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = plan.rate_at(self.step, self.total or math.inf)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1

    def _tell(self, begun: float, log: Log | None, due: bool) -> dict[str, Any]:
        """A line of the log about the steps since the last line. If minutes are given, also estimate the total."""
        loss = float(self.processes.sum(self._loss.clone()))  # waits for the device, so the clock is right
        step, seconds = self._logged
        elapsed = self.processes.agree(perf_counter() - begun)
        steps, spent = self.step - step, max(elapsed - seconds, 1e-9)
        if self.plan.minutes is not None:
            left = self.plan.minutes * 60 - elapsed - self._evaluation
            self.total = float(self.step + max(0, round(left * steps / spent)))
        if not math.isfinite(loss):
            raise OptionError(
                f"the loss is {loss} after {self.step} steps: train with a lower --rate than {self.plan.rate}"
            )
        line = {
            "step": self.step,
            "loss": loss / steps,
            "rate": self.plan.rate_at(self.step - 1, self.total or math.inf),
            "tokens_per_second": self._tokens / spent,
            "seconds": elapsed,
        }
        if due:
            self._loss, self._tokens, self._logged = torch.zeros_like(self._loss), 0, (self.step, elapsed)
            if log is not None:
                log.write(line)
        return line

    def _evaluate(self, begun: float, log: Log | None) -> dict[str, Any]:
        start = perf_counter()
        found = self.measured()
        self.accuracy = found["accuracy"]
        self._evaluation = self.processes.agree(perf_counter() - start)  # or they would end after different steps
        # Evaluations are not counted in the time per step.
        self._logged = (self._logged[0], self._logged[1] + self._evaluation)
        line = {"step": self.step, **found, "seconds": perf_counter() - begun}
        if log is not None:
            log.write(line)
        return line

    def held_out_batches(self) -> Iterator[Batch]:
        """This process's batches of the texts of an evaluation."""
        some = np.arange(len(self.held_out))[:_HELD_OUT]
        some = some[np.argsort(self.held_out.lengths[some], kind="stable")]
        batches = list(cut(some, self.held_out, self.plan.batch_tokens))
        for texts in batches[self.processes.rank :: self.processes.count]:
            yield self.held_out.batch(texts).to(self.device)

    def precision(self) -> AbstractContextManager[Any]:
        if self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()


class Loop(Steps):
    """The steps of a head."""

    def __init__(
        self,
        head: Head,
        teacher: Teacher,
        weights: Weights,
        depths: int,
        texts: Texts,
        held_out: Texts,
        plan: TrainingPlan,
        processes: Processes,
    ) -> None:
        super().__init__(head, teacher.device, texts, held_out, plan, processes)
        self.head, self.teacher, self.weights, self.depths = head, teacher, weights, depths

    def learn(self, texts: NDArray[np.int64], guesses: int) -> torch.Tensor:
        batch = self.texts.batch(texts).to(self.device)
        states, last = self.teacher.read(batch.tokens)
        with self.precision():
            unrolled = self.weights.recipe.unroll(self.head, states, batch.tokens, self.depths, self._practice(batch))
            return backward(unrolled, batch, last, self.teacher, self.weights, guesses)

    def _practice(self, batch: Batch) -> Practice:
        counted = torch.zeros(batch.tokens.numel(), dtype=torch.bool, device=batch.tokens.device)
        counted = counted.index_fill(0, batch.places, True).view_as(batch.tokens)
        # Depends on the plan's seed and on the step.
        seed = int(np.random.default_rng((self.plan.seed, self.step)).integers(1 << 31))
        return Practice(counted, seed, min(1.0, self.step / self.total) if self.total else 0.0)

    def measured(self) -> dict[str, list[float]]:
        """accuracy: the share of correct predictions on held-out texts, by depth."""
        depths = DEPTHS if self.head.reach is None else min(DEPTHS, self.head.reach)
        found = torch.zeros(depths, 2, dtype=torch.long, device=self.teacher.device)
        for batch in self.held_out_batches():
            states, _ = self.teacher.read(batch.tokens)
            with torch.no_grad(), self.precision():
                unrolled = self.weights.recipe.unroll(self.head, states, batch.tokens, depths, None)
                found += hits(unrolled, batch, self.teacher, depths)
        right, made = self.processes.sum(found).T.tolist()
        return {"accuracy": [r / max(1, m) for r, m in zip(right, made, strict=True)]}

    def ranks(self, texts: int = 32) -> list[list[float]]:
        """How often the head's token of each rank is right at each depth, on some held-out texts: for static trees."""
        table, weight = np.zeros(0), 0
        for i in range(min(texts, len(self.held_out))):
            text, _ = self.held_out.text(i)  # alone, so without padding, which would count as well guessed
            if len(text) < MEASURED:
                continue
            tokens = torch.from_numpy(text.astype(np.int64))[None].to(self.teacher.device)
            states, _ = self.teacher.read(tokens)
            with self.precision():
                found = np.array(measure(self.head, states, tokens))
            table = found * tokens.shape[1] + (table if weight else 0)
            weight += tokens.shape[1]
        return (table / max(1, weight)).tolist()
