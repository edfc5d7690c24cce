"""A drafter has one colour, and it is nobody else's."""

from itertools import combinations
from math import dist

import pytest

from slipstream import drafters
from slipstream.colours import COLOURS, OTHERS, STYLE, colour
from slipstream.evaluate.contestants import PEERS


def oklab(code):
    """Coordinates in which equal distances look equally different."""
    srgb = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in srgb)
    long = (0.4122 * r + 0.5363 * g + 0.0515 * b) ** (1 / 3)
    middle = (0.2119 * r + 0.6807 * g + 0.1074 * b) ** (1 / 3)
    short = (0.0883 * r + 0.2817 * g + 0.6300 * b) ** (1 / 3)
    return (
        0.2105 * long + 0.7936 * middle - 0.0041 * short,
        1.9780 * long - 2.4286 * middle + 0.4506 * short,
        0.0259 * long + 0.7828 * middle - 0.8087 * short,
    )


def test_everyone_who_comes_with_slipstream_has_a_fixed_colour():
    assert set(COLOURS) == {*drafters.names(), *PEERS}


@pytest.mark.parametrize("dark", [False, True])
def test_no_two_colours_look_alike(dark):
    every = [oklab(pair[dark]) for name, pair in COLOURS.items() if name != "none"]
    every += [oklab(pair[dark]) for pair in OTHERS]
    assert min(dist(a, b) for a, b in combinations(every, 2)) > 0.08


def test_variants_share_their_drafters_colour_and_others_have_one_by_name():
    assert colour("pld length=4") == colour("pld") == "--of-pld"
    assert colour("eagle3:2") == colour("eagle3") != colour("eagle")
    assert colour("echo") == "--of-other1"  # the same in every process, today and later
    assert {colour(f"drafter{i}") for i in range(40)} == {f"--of-other{i}" for i in range(len(OTHERS))}
    for name in (*COLOURS, "echo", "\ud800"):
        assert f"{colour(name)}: #" in STYLE
