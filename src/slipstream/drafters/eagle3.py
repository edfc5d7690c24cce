"""eagle3: one layer over three of the target's states, trained on its own predictions; drafts as EAGLE-2 does."""

from __future__ import annotations

from slipstream.drafters._eagle import FeatureDrafter
from slipstream.heads.eagle3 import Eagle3


class Eagle3Drafter(FeatureDrafter):
    """An EAGLE-3 head: one layer over three of the target's states."""

    kind = "eagle3"
    head: Eagle3
