"""Rows: the answers of one call of transformers' `generate`, released column by column, as its own loop does.

Streamers expect columns, and so do stopping criteria that look at all rows or count their calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slipstream.request import Request
from slipstream.sequence import Sequence as Running
from slipstream.stats import Stats


class Rows:
    """Rows grow at different speeds, so a column is complete when the slowest row has reached it. Tokens of a row after
    the column in which a criterion ended it are dropped.

    criteria: called once for each column; None if every row ends by itself. pad: the token for rows that end before
    others; None lets these continue until the last one ends, as transformers does if no token ends a text.
    """

    def __init__(
        self, input_ids: torch.Tensor, requests: list[Request], criteria: Any, pad: int | None, streamer: Any
    ) -> None:
        self._prompts = self._shown = input_ids  # _shown: what the criteria were called with last
        self._requests = requests
        self._criteria, self._pad, self._streamer = criteria, pad, streamer
        self._running: dict[int, Running] = {}
        self._columns: list[list[int]] = []
        self._over = [False] * len(requests)
        self._lengths = [0] * len(requests)

    def follow(self, steps: Iterator[Running]) -> None:
        """Take the engine's steps until every row has ended."""
        watched = self._criteria is not None or self._streamer is not None
        try:
            for sequence in steps:
                self._running[id(sequence.request)] = sequence
                if watched and self._advance():
                    return
            self._advance()
        finally:
            steps.close()  # type: ignore[attr-defined]

    @property
    def sequences(self) -> torch.Tensor:
        """(rows, prompt and answers) as `generate` returns them."""
        return torch.cat([self._prompts, self._prompts.new_tensor(self._columns).T], dim=1)

    @property
    def stats(self) -> list[Stats]:
        """The statistics of each row. Dropped tokens don't count as new, but their time does."""
        made = [self._running[id(request)].stats for request in self._requests]
        for stats, length in zip(made, self._lengths, strict=True):
            stats.new_tokens = length
        return made

    def _advance(self) -> bool:
        """Take every column that is complete. Returns whether all rows have ended."""
        while not all(self._over):
            column = []
            for i in range(len(self._requests)):
                token = self._token(i)
                if token is None:
                    return False
                column.append(token)
            self._take(column)
        return True

    def _token(self, i: int) -> int | None:
        """Row i's token in the next column, if it is known."""
        if self._over[i] and self._pad is not None:
            return self._pad
        running, at = self._running.get(id(self._requests[i])), len(self._columns)
        if running is not None and at < len(running.tokens):
            return running.tokens[at]
        return (self._pad or 0) if running is not None and running.finish is not None else None

    def _take(self, column: list[int]) -> None:
        self._columns.append(column)
        stopped = [False] * len(column) if self._criteria is None else self._stopped()
        for i, request in enumerate(self._requests):
            if self._over[i] and self._pad is not None:
                continue
            running = self._running[id(request)]
            self._lengths[i] = min(len(self._columns), len(running.tokens))
            ended = running.finish is not None and len(running.tokens) <= len(self._columns)
            if stopped[i] or ended:
                self._over[i] = True
                if self._pad is not None:
                    request.cancel()
        if self._streamer is not None:
            self._streamer.put(torch.tensor(column))

    def _stopped(self) -> list[bool]:
        """For each row, whether the criteria end it after the new column."""
        self._shown = torch.cat([self._shown, self._shown.new_tensor(self._columns[-1])[:, None]], dim=1)
        return self._criteria(self._shown, None).tolist()
