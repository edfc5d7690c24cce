"""Search in Triton finds what plain torch finds, however the work is cut up."""

import pytest
import torch
from device import CUDA, DEVICE

from slipstream.datastores.dense import scan
from slipstream.datastores.dense.device import nearest, nearest_plainly, unpacked
from slipstream.datastores.dense.transform import Transform
from slipstream.targets.captured.function import Captured

HIDDEN, ROWS = (576, 200_000) if CUDA else (300, 900)
DTYPE = torch.bfloat16 if CUDA else torch.float16  # numpy has no bfloat16


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """In the interpreter, small pieces: small groups then have several."""
    if not CUDA:
        for name, size in (("PARTS", 4), ("BLOCK", 32)):
            monkeypatch.setattr(scan, name, size)


def given(dims, seed=0, rows=ROWS, hidden=HIDDEN):
    """A transform, vectors of unit length, and states."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator)

    transform = Transform(noise(hidden), noise(hidden).abs() + 0.1, noise(hidden, dims), torch.ones(dims))
    vectors = torch.nn.functional.normalize(noise(rows, dims)).half()
    return transform.to(DEVICE), vectors.to(DEVICE), noise(4, hidden).to(DEVICE, DTYPE)


def assert_same(found, expected, vectors, queries):
    """The similarities are the right ones, and those of the rows. Rows may change places where they are equal."""
    for a, b, query in zip(found.cpu().numpy(), expected.cpu().numpy(), queries, strict=True):
        near, rows = unpacked(a)
        right, _ = unpacked(b)
        torch.testing.assert_close(torch.tensor(near), torch.tensor(right), atol=1e-5, rtol=0)
        its = vectors[torch.from_numpy(rows).to(DEVICE)].float() @ query
        torch.testing.assert_close(torch.tensor(near), its.cpu(), atol=1e-5, rtol=0)
        assert len(set(rows.tolist())) == len(rows)
        assert (near[:-1] >= near[1:]).all()


@pytest.mark.parametrize("count", [1, 5, 10])
@pytest.mark.parametrize("dims", [8, 24, 64])
def test_groups_of_every_size(dims, count):
    transform, vectors, states = given(dims)
    bounds = torch.tensor([[0, ROWS], [17, 18], [40, 40], [100, 100 + ROWS // 3]], device=DEVICE)
    best, queries = scan.nearest_rows(transform, vectors, count, states, bounds)
    expected, queries_expected = nearest_plainly(transform, vectors, count, states, bounds)
    torch.testing.assert_close(queries, queries_expected, atol=1e-5, rtol=0)
    assert_same(best, expected, vectors, queries)
    assert [len(unpacked(row)[1]) for row in best.cpu().numpy()] == [count, 1, 0, count]


def test_programs_that_tell_each_other_lose_nothing():
    """What they know of each other changes while they look, so once is not enough."""
    transform, vectors, _ = given(64)
    generator = torch.Generator().manual_seed(1)
    for _ in range(300 if CUDA else 2):
        states = torch.randn(1, HIDDEN, generator=generator).to(DEVICE, DTYPE)
        bounds = torch.tensor([[0, ROWS]], device=DEVICE)
        best, queries = scan.nearest_rows(transform, vectors, 10, states, bounds)
        assert_same(best, nearest_plainly(transform, vectors, 10, states, bounds)[0], vectors, queries)


def test_equals_come_in_the_order_they_stand_in():
    """Equal rows in all blocks: the first of them are found."""
    transform, vectors, states = given(16, rows=300)
    vectors[:] = vectors[0].clone()
    best, _ = scan.nearest_rows(transform, vectors, 6, states, torch.tensor([[10, 300]] * 4, device=DEVICE))
    for row in best.cpu().numpy():
        assert unpacked(row)[1].tolist() == list(range(10, 16))


def test_the_best_may_lie_in_one_block_or_in_many():
    transform, vectors, states = given(64)
    near = transform(states[:1])[0]
    for places in (range(64, 74), range(5, ROWS, ROWS // 10)):
        changed = vectors.clone()
        for i, place in enumerate(places):
            changed[place] = (near * (1 - i / 100)).half()
        best, _ = scan.nearest_rows(transform, changed, 10, states[:1], torch.tensor([[0, ROWS]], device=DEVICE))
        assert unpacked(best[0].cpu().numpy())[1].tolist() == list(places)[:10]


def test_the_opposite_of_all_there_is_has_a_nearest():
    transform, vectors, states = given(16, rows=300)
    vectors[:] = -(transform(states[:1]) + 0.1 * vectors.float()).half()
    bounds = torch.tensor([[3, 290]], device=DEVICE)
    best, _ = scan.nearest_rows(transform, vectors, 5, states[:1], bounds)
    assert (unpacked(best[0].cpu().numpy())[0] < -0.5).all()
    expected, queries = nearest_plainly(transform, vectors, 5, states[:1], bounds)
    assert_same(best, expected, vectors, queries)


def test_what_is_not_a_number_finds_nothing():
    transform, vectors, states = given(16)
    states[1] = torch.nan
    best, _ = scan.nearest_rows(transform, vectors, 3, states, torch.tensor([[0, 200]] * 4, device=DEVICE))
    assert [len(unpacked(row)[1]) for row in best.cpu().numpy()] == [3, 0, 3, 3]


def test_captured_it_follows_its_inputs():
    transform, vectors, states = given(64)
    search = Captured(lambda *inputs: nearest(transform, vectors, 10, *inputs), DEVICE)
    for first, last in ((0, ROWS), (7, 9), (50, 50), (100, ROWS // 2)):
        bounds, own = torch.tensor([[first, last]] * 4), torch.randn(4, 64, 64, device=DEVICE)
        found = search(states, bounds, own).clone()
        expected, queries = nearest_plainly(transform, vectors, 10, states, bounds.to(DEVICE))
        assert_same(found[:, :10], expected, vectors, queries)
        similarity = found[:, 10:].view(torch.float32)
        torch.testing.assert_close(similarity, (own @ queries[:, :, None])[:, :, 0], atol=1e-4, rtol=0)
        assert torch.equal(search(states, bounds), found[:, :10])
