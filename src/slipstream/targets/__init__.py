"""The only place that touches Hugging Face models and their caches.

`Target` is the interface that the engine uses. `TreeTarget` scores whole trees with a cache of its own, `ChainTarget`
runs models whose state can't branch, and `open_target` chooses the one that fits.
"""

from slipstream.loading.models import load_model
from slipstream.targets.base import Scores, Slot, Target, Want
from slipstream.targets.choose import open_target

__all__ = ["Scores", "Slot", "Target", "Want", "load_model", "open_target"]
