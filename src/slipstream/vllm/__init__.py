"""slipstream's retrieval inside vLLM: a proposer that drafts from each text, from earlier answers and from stores.

    speculative_config={"method": "custom_class", "model": "slipstream.vllm.Proposer", "num_speculative_tokens": 12}

Importing this loads neither torch nor vLLM. It only reads numbers of vLLM's configuration, and arrays.
"""

from slipstream.vllm.options import ProposerOptions
from slipstream.vllm.proposer import Proposer

__all__ = ["Proposer", "ProposerOptions"]
