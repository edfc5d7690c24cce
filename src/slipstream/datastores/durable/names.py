"""Names of collections and sources, which must stay distinct in every encoding, and of a store's files."""

from __future__ import annotations

import json
import re

from slipstream.errors import StoreError

ENCODING = ("utf-8", "surrogatepass")  # a file's name may be any bytes, which Python hands out as surrogates
LONGEST = 200  # bytes of a collection's name and of a fingerprint: they must fit into a segment's header
LONGEST_SOURCE = 0xFFFF
SEGMENT = re.compile(r"\d{8,20}\.seg")
LOG = re.compile(r"\d{8,20}\.log")
OURS = re.compile(r"\d{8,20}\.(seg|log|making)|store(\.copy)?\.json\.making")


def checked_collection(name: str) -> str:
    if not name or len(name.encode(*ENCODING)) > LONGEST:
        raise StoreError(f"collection {name[:80]!r}: a name has 1 to {LONGEST} bytes")
    return _kept_apart("collection", name)


def checked_source(name: str) -> str:
    if len(name) > LONGEST_SOURCE // 4 and len(name.encode(*ENCODING)) > LONGEST_SOURCE:
        raise StoreError(f"source {name[:80]!r}…: a name has at most {LONGEST_SOURCE} bytes")
    return name if name.isascii() else _kept_apart("source", name)


def _kept_apart(what: str, name: str) -> str:
    """Refuse names that JSON does not preserve. It joins a pair of surrogates into one character, so two different
    names, and their tenants' data, would become one."""
    if json.loads(json.dumps(name)) != name:
        raise StoreError(f"{what} {name!r}: its surrogates make up a character, so write that character instead")
    return name
