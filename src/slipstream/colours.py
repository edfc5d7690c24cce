"""A drafter's colour, the same on every page: fixed for built-in drafters, else by a hash of the name."""

from __future__ import annotations

from hashlib import sha256

# For light and for dark screens. The first six are Okabe and Ito's, which colour-blind people can tell apart. Twenty
# hues are too many for anyone to tell apart, so pages add a second cue: underlines, shapes, names.
COLOURS = {
    "none": ("#8b929c", "#7b838e"),
    "suffix": ("#0072b2", "#4da3dd"),
    "pld": ("#e69f00", "#f0b232"),
    "eagle3": ("#009e73", "#2fbf96"),
    "model": ("#cc79a7", "#dd96bd"),
    "rest": ("#d55e00", "#ee7d33"),
    "eagle": ("#56b4e9", "#a5dcfa"),
    "auto": ("#e0218a", "#ff5fae"),
    "dresd": ("#8b1a3f", "#b5466e"),
    "dflash": ("#1d3639", "#0b8291"),
    "falcon": ("#ff32fe", "#a400e4"),
    "lookahead": ("#2e8b00", "#38cc07"),
    "magicdec": ("#480048", "#786030"),
    "medusa": ("#8a8a00", "#a9a92e"),
    "mlp": ("#7a4a1e", "#b08050"),
    "prediction": ("#a32cc4", "#cf6ee8"),
    "rasd": ("#1e6b2f", "#5a9e4f"),
    "redrafter": ("#3b2a9e", "#8377ea"),
    "spire": ("#f2b6a0", "#5c2a1c"),
    "hf": ("#5b6b7f", "#9aa7b8"),
    "hf-pld": ("#b59a6a", "#e2d3ac"),
    "hf-assisted": ("#8f6f95", "#8f6fa0"),
}
OTHERS = (("#6fae1a", "#a4ec50"), ("#00a6b8", "#22d3dd"), ("#b5443a", "#d8463f"), ("#6d8bff", "#4a66f0"))


def drafter_of(name: str) -> str:
    """The drafter in a contestant's or a source's name: `pld length=4` is `pld`, `eagle3:2` is `eagle3`."""
    return name.partition(" ")[0].partition(":")[0]


def colour(name: str) -> str:
    """The CSS variable that holds a drafter's colour, for pages that have STYLE."""
    drafter = drafter_of(name)
    if drafter in COLOURS:
        return f"--of-{drafter}"
    digest = sha256(drafter.encode(errors="replace")).digest()  # Python's own hash differs from run to run
    return f"--of-other{digest[0] % len(OTHERS)}"


def _variables(dark: bool) -> str:
    every = COLOURS | {f"other{i}": pair for i, pair in enumerate(OTHERS)}
    return " ".join(f"--of-{name}: {pair[dark]};" for name, pair in every.items())


STYLE = f""":root {{ {_variables(dark=False)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(dark=True)} }} }}
"""
