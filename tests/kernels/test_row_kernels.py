"""Products and norms in Triton: right, and for each row independent of the others. (In the interpreter all but the
bits, since its products depend on numpy.)"""

import pytest
import torch
from device import CUDA, DEVICE

from slipstream.kernels import linear
from slipstream.kernels.cache_write import move_cache
from slipstream.kernels.layer_pieces import gated
from slipstream.kernels.linear import parts, skinny_linear
from slipstream.kernels.norm import normalise
from slipstream.kernels.ops import walk
from slipstream.kernels.top import best_of_rows, top_rows
from slipstream.kernels.walk import walk_down

DTYPE = torch.bfloat16 if CUDA else torch.float16  # numpy has no bfloat16


def noise(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, DTYPE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (200, 112), (64, 4096), (4096, 2048), (9000, 576)])
def test_products_are_right_and_rows_alone(outputs, inputs, bias):
    weight, b = noise(outputs, inputs, scale=0.05), noise(outputs, seed=1) if bias else None
    x = noise(3, 50, inputs, seed=2)
    whole = skinny_linear(x, weight, b)
    right = x.double() @ weight.double().T + (0 if b is None else b.double())
    torch.testing.assert_close(whole.double(), right, rtol=0.02, atol=0.02)
    if CUDA:
        for rows in (1, 7, 16, 17, 64, 100, 128):
            assert torch.equal(skinny_linear(x.view(150, -1)[:rows].clone(), weight, b), whole.view(150, -1)[:rows])


@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (64, 4096), (200, 112)])
def test_what_came_in_is_added_to_the_rounded_product(outputs, inputs):
    x, weight, before = noise(2, 7, inputs), noise(outputs, inputs, scale=0.05), noise(2, 7, outputs, seed=1)
    assert torch.equal(skinny_linear(x, weight, None, before), skinny_linear(x, weight) + before)


@pytest.mark.parametrize(("inner", "inputs"), [(1536, 576), (100, 112), (32, 4096), (5504, 256)])
def test_a_gated_product_is_the_product_and_then_the_gate(inner, inputs):
    x, weight, bias = noise(2, 35, inputs), noise(2 * inner, inputs, scale=0.05), noise(2 * inner, seed=1)
    for b in (None, bias):
        assert torch.equal(skinny_linear(x, weight, b, gated=True), gated(skinny_linear(x, weight, b)))


@pytest.mark.parametrize("tile", [(256, 64, 3, 8), (128, 64, 4, 8)], ids=["256 high", "128 high"])
@pytest.mark.parametrize(("outputs", "inputs"), [(600, 128), (512, 4096), (200, 112)])
def test_high_tiles_keep_the_bits(outputs, inputs, tile, monkeypatch):
    """Those of many rows, taken for products that would not fill a device."""
    x, weight, bias = noise(150, inputs), noise(outputs, inputs, scale=0.05), noise(outputs, seed=1)
    before, names = noise(150, outputs, seed=2), ("HIGH", "DEEP", "STAGES", "num_warps")
    products = [
        lambda: skinny_linear(x, weight),
        lambda: skinny_linear(x, weight, bias, before),
        lambda: skinny_linear(x, weight, bias, gated=True),
    ]
    expected = [product() for product in products]
    monkeypatch.setattr(linear, "tile", lambda *_: dict(zip(names, tile, strict=True)) | {"ROWS": 128})
    for product, usual in zip(products, expected, strict=True):
        if CUDA:
            assert torch.equal(product(), usual)
        torch.testing.assert_close(product(), usual, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not CUDA, reason="minutes in the interpreter")
@pytest.mark.parametrize(("outputs", "inputs"), [(8192, 1024), (512, 8192), (40000, 112)])
def test_products_of_many_rows_are_those_of_few(outputs, inputs):
    x, weight = noise(2048, inputs), noise(outputs, inputs, scale=0.05)
    assert linear.tile(2048, outputs, parts(outputs, inputs))["HIGH"] == 256
    few = [torch.cat([skinny_linear(some, weight, gated=g) for some in x.split(64)]) for g in (False, True)]
    for rows in (129, 300, 1024, 2048):
        for g in (False, True):
            assert torch.equal(skinny_linear(x[:rows], weight, gated=g), few[g][:rows])


def test_few_outputs_are_summed_up_in_parts():
    assert parts(64, 4096) > 1
    assert parts(22016, 4096) == 1


@pytest.mark.parametrize("kind", ["plain", "shifted", "centred"])
@pytest.mark.parametrize("width", [64, 576, 4096])
def test_norms_are_right_and_rows_alone(width, kind):
    x, weight = noise(70, width, scale=3), noise(width, seed=1)
    bias = noise(width, seed=2) if kind == "centred" else None
    found = normalise(x, weight, bias, 1e-5, kind == "centred", kind == "shifted")
    v = x.double() - (x.double().mean(-1, keepdim=True) if kind == "centred" else 0)
    v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5) * (weight.double() + (kind == "shifted"))
    torch.testing.assert_close(found.double(), v + (0 if bias is None else bias.double()), rtol=0.02, atol=0.02)
    for rows in (1, 16, 33):
        alone = normalise(x[:rows].clone(), weight, bias, 1e-5, kind == "centred", kind == "shifted")
        assert torch.equal(alone, found[:rows])


def test_accepted_keys_move_into_place_even_over_one_another():
    keys, values = noise(3, 4, 2, 40, 24), noise(3, 4, 2, 40, 16, seed=1)
    expected = keys.clone(), values.clone()
    paths = {1: (10, [0, 2, 3, 7]), 3: (0, [1, 2, 3, 4, 5])}
    # Behind a path stands what an earlier step left.
    integers = {name: torch.full((2, 8), left, dtype=torch.int32) for name, left in (("sources", 30), ("places", 20))}
    for i, (row, (start, path)) in enumerate(paths.items()):
        integers["sources"][i, : len(path)] = start + torch.tensor(path)
        integers["places"][i, : len(path)] = start + torch.arange(len(path))
        for before, after in zip((keys, values), expected, strict=True):
            after[:, row, :, start : start + len(path)] = before[:, row, :, [start + p for p in path]]
    rows, counts = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    move_cache(keys, values, rows.to(DEVICE), *(t.to(DEVICE) for t in integers.values()), counts.to(DEVICE))
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


@pytest.mark.parametrize(("vocabulary", "k"), [(49152, 8), (100, 8), (5000, 3), (2048, 16), (5000, 1)])
def test_the_most_probable_tokens(vocabulary, k):
    x = noise(2, 3, vocabulary, scale=4)
    x[0, 0, ::2] = -torch.inf
    logp, ids = top_rows(x, k)
    right = torch.log_softmax(x.float(), -1)
    torch.testing.assert_close(logp, right.topk(k).values, rtol=0, atol=1e-4)
    torch.testing.assert_close(right.gather(-1, ids), logp, rtol=0, atol=1e-4)
    assert all(len(set(row.tolist())) == k for row in ids.view(-1, k))


@pytest.mark.parametrize("vocabulary", [49152, 100, 5000, 2048])
def test_the_best_token_of_equals_the_first(vocabulary):
    x = noise(2, 3, vocabulary)
    x[0, 1, [7, 70, vocabulary - 1]] = 9.0
    x[1, 0] = -torch.inf
    x[1, 1, vocabulary - 2] = torch.nan
    tokens, bits = best_of_rows(x)
    values = bits.view(torch.float32)
    assert tokens.dtype == torch.int32
    assert (int(tokens[0, 1]), int(tokens[1, 0]), int(tokens[1, 1])) == (7, 0, vocabulary - 2)
    torch.testing.assert_close(values, x.amax(-1).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(x.gather(-1, tokens.long()[..., None])[0, :, 0].float(), values[0])


@pytest.mark.parametrize(("n", "room"), [(1, 1), (8, 1), (16, 7), (128, 7), (128, 100)])
def test_a_walk_ends_where_plain_torch_ends_it(n, room):
    """Random trees of few tokens one after the other, equal siblings among them, and one whose drafts are padding. Some
    are walked, in any order."""
    generator = torch.Generator().manual_seed(n)
    trees = 5
    ids, chosen = (torch.randint(0, 2, (2, 1, trees * n), generator=generator, dtype=torch.int32) for _ in range(2))
    ids = ids[0]
    depths, parents = torch.zeros_like(ids), torch.full_like(ids, -1)
    for root in range(0, trees * n, n):
        for j in range(root + 1, root + n):
            parents[0, j] = torch.randint(max(root, j - 4), j, (), generator=generator)
            depths[0, j] = depths[0, parents[0, j]] + 1
    depths[0, 4 * n + 1 :] = -2
    roots = n * torch.tensor([[3, 0], [0, 7], [4, 1], [1, 1], [0, 0]])[:, 0]  # a column of a table
    found = walk_down(*(t.to(DEVICE) for t in (ids, depths, parents, chosen)), roots.to(DEVICE), room)
    assert torch.equal(found.cpu(), walk(ids, depths, parents, chosen, roots, room))
