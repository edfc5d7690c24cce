"""The roofline: two steps by hand, and where drafting with fewer keys can pay."""

import pytest

from slipstream.budget.roofline import Machine, Sizes, modelled_speedup, step_seconds

MACHINE = Machine(bandwidth=1e3, compute=1e5)
SIZES = Sizes(weights=1000, width=2, key_bytes=10, per_key=40)


def test_a_step_takes_as_long_as_what_it_reads_or_computes():
    assert step_seconds(SIZES, MACHINE, 1, 100) == pytest.approx((2000 + 1000) / 1e3)
    assert step_seconds(SIZES, MACHINE, 1, 100, rows=2) == step_seconds(SIZES, MACHINE, 1, 100)  # bound by memory
    assert step_seconds(SIZES, MACHINE, 4, 100, rows=100) == pytest.approx(400 * (2000 + 4000) / 1e5)


def test_fewer_keys_pay_only_where_keys_are_most_of_a_step():
    def gain(batch, context):
        return modelled_speedup(SIZES, SIZES, MACHINE, batch, context, keys=16, depth=4, tokens=4.0)

    assert gain(1, 16) == pytest.approx(4 / 5)  # five equal steps for four tokens
    assert gain(1, 16) < 1 < gain(1, 4096)
    assert gain(2, 1024) < gain(8, 1024) < gain(32, 1024) < 4
