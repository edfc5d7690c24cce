"""The model hub: whether a name can be one of its names, and whether it can be asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]


def is_name(name: str) -> bool:
    """Whether the hub could know this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@contextmanager
def asked_once() -> Iterator[None]:
    """For as long as something is fetched: where the hub doesn't answer, only what was fetched before is looked at.

    huggingface_hub asks six times for each file, and there are several files: a minute in which nothing happens.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers() -> bool:
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # whatever the library for requests raises, which differs between versions
        return False
    return True
