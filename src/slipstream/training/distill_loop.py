"""Training steps of a draft model that learns its target's distributions (DistillSpec).

The texts are the target's, or the draft's own, written by the draft at that step (on-policy), or a mixture. Which texts
the draft writes depends on seed, step and text alone, so that a resumed run goes on as if it had not stopped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.llm import LLM
from slipstream.training.data import Batch, Texts, put_together
from slipstream.training.divergences import Divergence, total_variation
from slipstream.training.loop import Steps, TrainingPlan
from slipstream.training.losses import pieces
from slipstream.training.payoff import MEMORY
from slipstream.training.processes import Processes
from slipstream.training.teacher import Speaker

TOGETHER = 32  # texts that the draft writes at a time


class OwnTexts:
    """Answers that the draft writes itself, to the prompts of some texts."""

    def __init__(self, draft: Any, tokenizer: Any, share: float, seed: int) -> None:
        """share: of the texts."""
        self.share, self.seed = share, seed
        self._llm = LLM(draft, tokenizer, "none", max_batch=TOGETHER, memory=MEMORY) if share else None

    def instead(self, texts: Texts, which: NDArray[np.int64], step: int) -> Texts:
        """These texts; in a share of them the answer is replaced by one of the draft, which is no longer."""
        kept, requests, places = [], [], []
        for place, text in enumerate(which.tolist()):
            tokens, counted = texts.text(text)
            kept.append((tokens, counted))
            random = np.random.default_rng((self.seed, step, text))
            if self._llm is not None and random.random() < self.share:
                begin = int(counted.argmax())
                requests.append(
                    self._llm.request(
                        tokens[:begin].tolist(),
                        max_new_tokens=len(tokens) - begin,
                        temperature=1.0,
                        seed=int(random.integers(1 << 32)),
                        max_draft=0,
                    )
                )
                places.append(place)
        if self._llm is not None:
            ended = {id(s.request): s for s in self._llm.engine.run(requests) if s.finish is not None}
            for place, request in zip(places, requests, strict=True):
                written = ended[id(request)].tokens
                begin = len(request.tokens)
                tokens = np.array([*request.tokens, *written], np.int32)
                kept[place] = tokens, np.arange(len(tokens)) >= begin
        return put_together(kept)

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()


class DistillLoop(Steps):
    def __init__(
        self,
        draft: Speaker,
        target: Speaker,
        divergence: Divergence,
        own: OwnTexts,
        texts: Texts,
        held_out: Texts,
        plan: TrainingPlan,
        processes: Processes,
    ) -> None:
        super().__init__(draft.model, target.device, texts, held_out, plan, processes)
        self.draft, self.target, self.divergence, self.own = draft, target, divergence, own
        self.ids = min(draft.vocabulary, target.vocabulary)  # they may be padded differently

    def learn(self, texts: NDArray[np.int64], guesses: int) -> torch.Tensor:
        if self.own.share:
            mixed = self.own.instead(self.texts, texts, self.step)
            batch = mixed.batch(range(len(mixed)))
        else:
            batch = self.texts.batch(texts)
        with self.precision():
            return self.backward(batch.to(self.device), guesses)

    def backward(self, batch: Batch, by: int) -> torch.Tensor:
        """Add the gradient of the divergence at counted positions, divided `by`, to the draft's; returns the sum.

        Each piece is backpropagated at once, down to the draft's last states, and their summed gradient at the end.
        """
        with torch.no_grad():
            last = self.target.last(batch.tokens)
        states = self.draft.last(batch.tokens)
        leaf = states.detach().requires_grad_()
        total = torch.zeros((), device=self.device)
        for piece in pieces(batch, self.target):
            loss = self.divergence(*self.log_probs(piece, last, leaf)).sum() / by
            loss.backward()
            total += loss.detach()
        states.backward(leaf.grad)
        return total

    def log_probs(self, piece: Batch, last: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, V) twice: log-probabilities of the target and of the draft for the counted tokens."""
        rows = piece.places - 1
        with torch.no_grad():
            p = self.target.logits(last.flatten(0, 1).index_select(0, rows))
        q = self.draft.logits(states.flatten(0, 1).index_select(0, rows))
        return p[:, : self.ids].float().log_softmax(-1), q[:, : self.ids].float().log_softmax(-1)

    @torch.no_grad()
    def measured(self) -> dict[str, list[float]]:
        """accuracy: how often the draft's best token is the target's, the acceptance rate of greedy decoding. overlap:
        the acceptance rate of rejection sampling."""
        found = torch.zeros(3, dtype=torch.float64, device=self.device)
        for batch in self.held_out_batches():
            with self.precision():
                last, states = self.target.last(batch.tokens), self.draft.last(batch.tokens)
                for piece in pieces(batch, self.target):
                    p, q = self.log_probs(piece, last, states)
                    same = (p.argmax(-1) == q.argmax(-1)).sum()
                    found += torch.stack((same, (1 - total_variation(p, q)).sum(), same.new_tensor(len(p))))
        same, overlap, count = self.processes.sum(found).tolist()
        return {"accuracy": [same / max(1, count)], "overlap": [overlap / max(1, count)]}
