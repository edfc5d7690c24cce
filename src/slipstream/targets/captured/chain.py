"""Greedy chains of a draft model in one launch: each token is chosen and read on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.kernels.ops import best_tokens
from slipstream.notices import doing
from slipstream.sampling import BEST
from slipstream.stopwatch import preparing
from slipstream.targets.captured.fixed_step import FixedStep, StepTarget
from slipstream.targets.captured.inputs import Shape
from slipstream.targets.captured.recording import capture


class FixedChain:
    """Several steps captured as one. The first reads the tokens that each sequence has not read yet; each later step
    reads one token of each sequence."""

    def __init__(self, target: StepTarget, first: Shape, later: Shape, depth: int, vocabulary: int) -> None:
        """depth: tokens of a chain. vocabulary: tokens that may be drafted."""
        self.target, self.vocabulary = target, vocabulary
        shapes = [first, *[later] * (depth - 1)]
        self.steps = [FixedStep(target, shape, (), BEST, captured=False) for shape in shapes]
        cuda = target.device.type == "cuda"
        self._host = torch.zeros(later.rows, dtype=torch.long, pin_memory=cuda)  # each chain's last row in step 1
        self._ends = torch.zeros(later.rows, dtype=torch.long, device=target.device)
        self._answer = torch.zeros((depth, 2, later.rows), dtype=torch.float64, pin_memory=cuda)
        self._graph: Any = None
        if cuda:
            with preparing, doing(f"capturing {depth} steps of a draft"):
                self._graph, _ = capture(self.run, target.memory)

    def run(self) -> None:
        self._ends.copy_(self._host, non_blocking=True)
        tokens, found = None, []
        for step in self.steps:
            step.run_within(tokens)
            logits = step.logits[self._ends] if tokens is None else step.logits
            logp, ids = best_tokens(logits[:, : self.vocabulary].float(), 1)
            tokens = ids[:, 0]
            found.append(torch.stack([tokens.double(), logp[:, 0].double()]))
        self._answer.copy_(torch.stack(found), non_blocking=True)

    def __call__(self, ends: Sequence[int]) -> NDArray[np.float64]:
        """(depth, 2, sequences) tokens and their log-probabilities. ends: each chain's last row in the first step."""
        self._host[: len(ends)] = torch.tensor(ends)
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()
            torch.cuda.current_stream(self.target.device).synchronize()
        return self._answer[:, :, : len(ends)].numpy().copy()
