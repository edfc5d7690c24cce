"""The model hub: whether a name is valid there, and whether the hub is reachable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]


def is_name(name: str) -> bool:
    """Whether this is a valid name on the hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@contextmanager
def asked_once() -> Iterator[None]:
    """A block that fetches files: if the hub doesn't answer, only the local cache is used.

    huggingface_hub retries six times for each file, so with several files it would hang for a minute.
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
    except Exception:  # the HTTP library and its exceptions differ between versions
        return False
    return True
