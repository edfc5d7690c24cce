"""eagle3: one layer over three of the target's states, trained on its own guesses, drafts as EAGLE-2 does."""

from __future__ import annotations

from typing import Any

from slipstream.drafters._eagle import FeatureDrafter
from slipstream.heads.eagle3 import Eagle3


class Eagle3Drafter(FeatureDrafter):
    """An EAGLE-3 head: one layer over three of the target's states."""

    kind = "eagle3"
    head: Eagle3

    @classmethod
    def trials(cls, model: Any) -> list[dict[str, Any]]:
        """A head that can't guess every token, and draws where the request does."""
        some = range(0, model.get_output_embeddings().weight.shape[0], 2)
        return [{"drafter_path": Eagle3.fresh(model, draft_ids=some), "mode": "sample", "depth": 4, "width": 4}]
