"""Drafts that were started behind their steps, compared with drafts made afterwards."""

from __future__ import annotations

import numpy as np

from slipstream.drafters._head import HeadDrafter


def compare_drafts(monkeypatch) -> list[int]:
    """From now on each draft of a head that was started behind its step, and is taken, must be the one that would be
    made after it. Returns a list to which the number of its sequences is added each time."""
    began, sizes = HeadDrafter._started, []

    def compared(self, sessions, roots, batch):
        nodes = began(self, sessions, roots, batch)
        if nodes is None:
            return None
        sizes.append(len(sessions))
        table = self.make_table(sessions, roots, batch, False)
        anew = self.captured.fetch(table, self.joined(sessions, table)).numpy()[: len(sessions)]
        if batch == len(sessions[0].ahead.pending.result):  # products of other sizes may round differently
            assert np.array_equal(nodes[:, :2], anew[:, :2])  # tokens and parents
        np.testing.assert_allclose(nodes[:, 2].view(np.float32), anew[:, 2].view(np.float32), rtol=0.1, atol=1e-3)
        return nodes

    monkeypatch.setattr(HeadDrafter, "_started", compared)
    return sizes
