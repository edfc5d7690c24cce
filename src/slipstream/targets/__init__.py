"""The only place that touches Hugging Face models and their caches.

`Target` is what the engine sees; `TreeTarget` scores whole trees with its own cache, `ChainTarget` drives the models
whose state can't branch; `open_target` picks the one that fits.
"""

from slipstream.loading.models import load_model
from slipstream.targets.base import Scores, Slot, Target, Want
from slipstream.targets.choose import open_target

__all__ = ["Scores", "Slot", "Target", "Want", "load_model", "open_target"]
