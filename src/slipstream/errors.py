"""Every error slipstream raises on purpose. Each says what was found, what was needed and what to do.

SlipstreamError
├── ModelError             a model that can't be found, loaded or driven
│   ├── NumericalError     a model that answered with NaN, or with no possible token
│   └── CacheFullError     texts that need more memory than the cache has
├── DrafterError           an unknown drafter, or one that doesn't fit the target
├── OptionError            an unknown option, or a value out of range
├── StoreError             a datastore, or a source of one, that can't be built, opened or read
│   └── DamagedError       a file of a store that is cut off or whose bytes have changed
├── ClusterError           a cluster that can't be reached, or that loses work again and again
└── PromptError            a prompt that can't be continued
    └── ContextError       a prompt longer than the model's context
"""


class SlipstreamError(Exception):
    """The root of everything slipstream raises on purpose."""


class ModelError(SlipstreamError):
    """A model that can't be found, loaded or driven."""


class NumericalError(ModelError):
    """Logits from which no token can be chosen: NaN, or every token ruled out."""


class CacheFullError(ModelError):
    """Texts that need more memory than the cache has. Nothing was computed."""


class DrafterError(SlipstreamError):
    """An unknown drafter, or one that doesn't fit the target."""


class OptionError(SlipstreamError):
    """An unknown option, or a value out of range."""


class StoreError(SlipstreamError):
    """A datastore, or a source of one, that can't be built, opened or read."""


class DamagedError(StoreError):
    """A file of a store that is cut off or whose bytes have changed."""


class ClusterError(SlipstreamError):
    """A cluster that can't be reached, or that loses work again and again."""


class PromptError(SlipstreamError):
    """A prompt that can't be continued."""


class ContextError(PromptError):
    """A prompt longer than the model's context."""


class BusyError(SlipstreamError):
    """Too many requests are waiting already: try again later."""
