"""Growing a tree in Triton: what plain torch makes of the same numbers, ties and all; a depth by hand."""

import numpy as np
import pytest
import torch
from device import CUDA, DEVICE

from slipstream.heads import grow_kernel as kernel
from slipstream.heads.growth import Growth, grow_launch, grow_plain, keep_launch, keep_plain, new_record
from slipstream.heads.packing import unpack_first

INF = torch.inf
WIDE = 20 if CUDA else 12
V = 50  # tokens that a head can guess
STATIC = [(0,), (1,), (0, 0), (3,), (1, 2), (0, 0, 1), (1, 2, 0), (0, 1), (0, 0, 1, 2)]


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    """In the interpreter, few programs: it is slow to begin one."""
    if not CUDA:
        monkeypatch.setattr(kernel, "BLOCK", 64)


# ---- heads: (b, w, branch) log-probabilities, the best first


def smooth(generator, shape):
    return torch.randn(shape, generator=generator) - 2


def tied(generator, shape):
    """Sums of these are exact, so that paths tie across parents and depths."""
    return -torch.randint(0, 3, shape, generator=generator).float()


def broken(generator, shape):
    """Of every kind that can't be, or says nothing."""
    odd = torch.tensor([INF, torch.nan, -INF, 0.25, -0.0, 0.0, -1.0, -3.0])
    return odd[torch.randint(0, len(odd), shape, generator=generator)]


def silent(_generator, shape):
    return torch.full(shape, torch.nan)


HEADS = [smooth, tied, broken]
HEADS_IDS = [head.__name__ for head in HEADS]


def guesses(head, seed, shape):
    generator = torch.Generator().manual_seed(seed)
    logp = head(generator, shape).sort(dim=-1, descending=True).values
    ids = torch.rand((*shape[:2], V), generator=generator).argsort(dim=-1)[..., : shape[2]].contiguous()
    return logp.to(DEVICE), ids.to(DEVICE)


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def grown(growth, head, batch, names=None, seed=0):
    """A record grown by both, depth by depth from the same guesses; all that either gave back is compared."""
    mine, plain = (new_record(batch, growth.found, DEVICE) for _ in range(2))
    number, start = None, 0
    for depth, (read, width) in enumerate(zip((1, *growth.widths), (*growth.widths, 0), strict=True)):
        logp, ids = guesses(head, seed + depth, (batch, read, growth.branch))
        fixed = growth.fixed[depth] if growth.fixed and width else None
        given = (logp, ids, number, names, fixed)
        expected = grow_plain(*given, *plain, start, width, True)
        same(kernel.grow_rows(*given, *mine, start, width, True), expected)
        number, start = expected[2], start + read * growth.branch
    assert start == growth.found
    same(mine, plain)
    return plain


def kept(growth, record, first=None):
    count = min(growth.nodes, growth.found)
    expected = keep_plain(*record, growth.members, first, count)
    found = kernel.keep_rows(*record, growth.members, first, count)
    assert found.shape == expected.shape
    assert torch.equal(found[:, :2], expected[:, :2])
    torch.testing.assert_close(
        found[:, 2].view(torch.float32), expected[:, 2].view(torch.float32), rtol=1e-6, atol=0, equal_nan=True
    )
    return found


# ---- trees


@pytest.mark.parametrize("head", HEADS, ids=HEADS_IDS)
@pytest.mark.parametrize(
    ("width", "depth", "nodes", "guessable"),
    [(8, 4, 30, V), (8, 3, 1000, 5), (1, 4, 8, V), (6, 1, 3, V), (5, 3, 20, 1), (WIDE, 3, 64, V)],
)
def test_a_tree_is_grown_and_kept_as_in_plain_torch(width, depth, nodes, guessable, head):
    growth = Growth.dynamic(width, depth, nodes, guessable)
    kept(growth, grown(growth, head, batch=3))


@pytest.mark.parametrize("head", HEADS, ids=HEADS_IDS)
def test_a_static_tree_is_grown_and_kept_as_in_plain_torch(head):
    growth = Growth.static(STATIC, V, DEVICE)
    packed = kept(growth, grown(growth, head, batch=2))
    if head is smooth:
        assert (packed[:, 1] >= 0).sum(1).tolist() == [len(STATIC)] * 2


def test_a_head_that_knows_nothing_gives_padding_alone():
    growth = Growth.dynamic(4, 3, 12, V)
    assert (kept(growth, grown(growth, silent, batch=2))[:, 1] == -1).all()


def test_ids_stand_for_the_tokens_of_a_head():
    names = torch.arange(V, device=DEVICE) * 1000 + 7
    growth = Growth.dynamic(4, 3, 12, V)
    mapped, own = (grown(growth, smooth, 2, given) for given in (names, None))
    assert torch.equal(mapped[0][:, 0], own[0][:, 0] * 1000 + 7)
    assert torch.equal(mapped[0][:, 1], own[0][:, 1])


@pytest.mark.parametrize("head", [smooth, broken], ids=["smooth", "broken"])
@pytest.mark.parametrize("k", [1, 5])
def test_first_tokens_stand_behind_the_tree(head, k):
    growth = Growth.dynamic(4, 3, 12, V)
    first = torch.arange(3 * k, device=DEVICE).view(3, k) + 100
    packed = kept(growth, grown(growth, head, batch=3), first).cpu().numpy()
    assert [unpack_first(nodes) for nodes in packed] == [tuple(row) for row in first.tolist()]


def test_how_the_work_is_cut_up_does_not_matter(monkeypatch):
    growth = Growth.dynamic(6, 3, 40, V)
    for block, others in ((16, 512), (4, 16), (128, 32)):
        monkeypatch.setattr(kernel, "BLOCK", block)
        monkeypatch.setattr(kernel, "OTHERS", others)
        kept(growth, grown(growth, tied, batch=1))


def test_a_sequence_grows_the_same_alone():
    growth = Growth.dynamic(4, 2, 12, V)
    logp, ids = guesses(smooth, 1, (3, 1, 4))
    together = new_record(3, growth.found, DEVICE)
    chosen = kernel.grow_rows(logp, ids, None, None, None, *together, 0, 4, True)
    for i in range(3):
        alone = new_record(1, growth.found, DEVICE)
        one = kernel.grow_rows(logp[i : i + 1], ids[i : i + 1], None, None, None, *alone, 0, 4, True)
        same(one, [x[i : i + 1] for x in chosen])
        same([x[0, :, :4] for x in alone], [x[i, :, :4] for x in together])


@pytest.mark.parametrize("every", [True, False])
def test_torch_compile_is_told_what_they_give_and_write(every):
    growth = Growth.static(STATIC, V, DEVICE)
    logp, ids = guesses(tied, 0, (2, 1, growth.branch))
    record = [x.zero_() for x in new_record(2, growth.found, DEVICE)]
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for names, fixed, width in ((None, None, 3), (torch.arange(V, device=DEVICE), growth.fixed[0], growth.widths[0])):
        given = (logp, ids, None, names, fixed, *record, 0, width, every)
        torch.library.opcheck(grow_launch, given, test_utils=checks)
    for first in (None, ids[:, 0]):
        torch.library.opcheck(keep_launch, (*record, growth.members, first, 5), test_utils=checks)


# ---- beams


@pytest.mark.parametrize("head", HEADS, ids=HEADS_IDS)
@pytest.mark.parametrize("width", [1, 5, 8])
def test_beams_are_grown_as_in_plain_torch(width, head):
    length, batch = 4, 3
    room = length * width + width * width  # what is not chosen must not be written behind it either
    mine, plain = ([x.fill_(-9) for x in new_record(batch, room, DEVICE)] for _ in range(2))
    number = None
    for depth in range(length):
        logp, ids = guesses(head, depth, (batch, width if depth else 1, width))
        at = (depth * width, width, False)
        expected = grow_plain(logp, ids, number, None, None, *plain, *at)
        same(kernel.grow_rows(logp, ids, number, None, None, *mine, *at), expected)
        number = expected[2]
        assert number.tolist() == [list(range(1 + depth * width, 1 + (depth + 1) * width))] * batch
    same(mine, plain)


# ---- by hand, both


@pytest.fixture(params=["triton", "torch"])
def both(request):
    if request.param == "triton":
        return kernel.grow_rows, kernel.keep_rows
    return grow_plain, keep_plain


def test_two_depths_by_hand(both):
    """Root: a (-1), b (-2). After a: c (-2), d (-5); after b: e (-1), f (nothing). c and e tie: c was found first."""
    grow, keep = both
    a, b, c, d, e, f = range(10, 16)
    nodes, odds = record = new_record(1, 6, DEVICE)
    logp, ids = torch.tensor([[[-1.0, -2.0]]], device=DEVICE), torch.tensor([[[a, b]]], device=DEVICE)
    tokens, chain, number = grow(logp, ids, None, None, None, *record, 0, 2, True)
    assert (tokens.tolist(), chain.tolist(), number.tolist()) == ([[a, b]], [[0, 0]], [[1, 2]])
    logp = torch.tensor([[[-2.0, -5.0], [-1.0, torch.nan]]], device=DEVICE)
    ids = torch.tensor([[[c, d], [e, f]]], device=DEVICE)
    tokens, chain, number = grow(logp, ids, number, None, None, *record, 2, 3, True)
    assert (tokens.tolist(), chain.tolist(), number.tolist()) == ([[c, e, d]], [[0, 1, 0]], [[3, 5, 4]])
    assert nodes.tolist() == [[[a, b, c, d, e, f], [0, 0, 1, 1, 2, 2]]]
    assert odds.tolist() == [[[-1, -2, -2, -5, -1, -INF], [-1, -2, -3, -6, -3, -INF]]]

    packed = keep(*record, None, None, 6)
    assert packed[0, :2].tolist() == [[a, b, c, e, d, f], [0, 0, 1, 2, 1, -1]]
    probabilities = np.exp([-1, -2, -2, -1, -5, -INF])
    assert packed[0, 2].view(torch.float32).tolist() == pytest.approx(probabilities, rel=1e-6)

    members = torch.tensor([False, True, False, False, True, True], device=DEVICE)
    first = torch.tensor([[77, 78]], device=DEVICE)
    packed = keep(*record, members, first, 3)
    assert packed[0, :2].tolist() == [[b, e, a, 77, 78], [0, 1, -1, -2, -2]]
    assert packed[0, 2, 3:].tolist() == [-2, -2]


def test_beams_by_hand(both):
    """Two beams; the second depth's both continue the first one's second."""
    grow, _ = both
    nodes, odds = record = new_record(1, 4, DEVICE)
    logp, ids = torch.tensor([[[-1.0, -1.5]]], device=DEVICE), torch.tensor([[[3, 4]]], device=DEVICE)
    _, _, number = grow(logp, ids, None, None, None, *record, 0, 2, False)
    logp = torch.tensor([[[-4.0, -5.0], [-0.5, -1.0]]], device=DEVICE)
    ids = torch.tensor([[[5, 6], [7, 8]]], device=DEVICE)
    tokens, chain, number = grow(logp, ids, number, None, None, *record, 2, 2, False)
    assert (tokens.tolist(), chain.tolist(), number.tolist()) == ([[7, 8]], [[1, 1]], [[3, 4]])
    assert nodes.tolist() == [[[3, 4, 7, 8], [0, 0, 2, 2]]]
    assert odds.tolist() == [[[-1, -1.5, -0.5, -1], [-1, -1.5, -2, -2.5]]]
