"""A head's layer in few launches: each kernel against plain torch, and whole drafts against the modules' own code in
double precision, which training differentiates.
"""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from device import CUDA, DEVICE
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from families import VOCABULARY, tiny_model
from slipstream import drafters
from slipstream.heads import HEADS, base, decoder, keys, redrafter
from slipstream.heads import layer_kernel as kernel
from slipstream.kernels import layer_pieces as pieces
from slipstream.kernels.sizes import PAGE
from slipstream.targets.cache import LayerShape
from slipstream.targets.captured.arena import Arena
from slipstream.targets.captured.modules import StandIns

DTYPE = torch.bfloat16 if CUDA else torch.float16  # numpy has no bfloat16
NEAR = {"rtol": 0.03, "atol": 0.03} if CUDA else {"rtol": 0.005, "atol": 0.005}


@pytest.fixture
def kernels(monkeypatch):
    """Half precision goes through kernels on this device, whichever it is."""
    if not CUDA:
        for module in (base, decoder, redrafter):
            monkeypatch.setattr(module, "by_kernels", lambda x: x.dtype == DTYPE and not torch.is_grad_enabled())


def noise(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, DTYPE)


def numbers(high, *shape, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rms(x, weight, eps=1e-5):
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def close(found, expected, **near):
    assert not found.isnan().any()
    torch.testing.assert_close(found.cpu().double(), expected.cpu().double(), **(near or NEAR))


# ---- kernels


def test_what_waits_gets_its_columns_and_padding_goes_behind():
    given = torch.tensor(
        [[7, 10, 3, 0, 0, 4, 5, 6], [2, 0, 1, 0, 0, 0, 0, 9], [5, 40, 5, 1, 2, 3, 4, 5]], device=DEVICE
    )
    places = rows, ends, positions, columns, free = kernel.first_rows(given, 3, None, 0, 0)
    assert rows.tolist() == [7, 2, 5]
    assert ends.tolist() == [[12, 0, 44], [13, 1, 45], [14, 2, 46]]
    assert columns.tolist() == positions.tolist() == [[13, 13, 10, 11, 12], [1, 1, 1, 1, 0], [40, 41, 42, 43, 44]]
    assert free.tolist() == ends[1].tolist()
    for found, expected in zip(places, keys.first_places(given.cpu(), 3), strict=True):
        assert torch.equal(found.cpu(), expected)
        assert found.dtype == torch.int32


def test_in_pages_what_waits_goes_where_its_text_lies_and_drafts_behind_all_pages():
    tables = torch.tensor([[3, 1, 0], [0, 0, 0], [2, 7, 6]], dtype=torch.int32, device=DEVICE)
    given = torch.tensor([[2, 127, 3, 0, 4, 5, 6], [0, 0, 1, 0, 0, 0, 9], [-1, 0, 1, 0, 0, 0, 0]], device=DEVICE)
    places = rows, ends, positions, columns, free = kernel.first_rows(given, 2, tables, 1024, 50)
    assert rows.tolist() == [2, 0, 0]
    assert ends.tolist() == [[129, 0, 0], [130, 1, 1]]
    assert positions.tolist() == [[130, 127, 128, 129], [1, 1, 1, 0], [1, 1, 1, 0]]
    pages = [[1024, 2 * PAGE + 127, 7 * PAGE, 7 * PAGE + 1], [1074, 1074, 1074, 3 * PAGE], [1124, 1124, 1124, 0]]
    assert columns.tolist() == pages  # the last row is nobody's: page 0 is no text's
    assert free.tolist() == [1024, 1074, 1124]
    for found, expected in zip(places, keys.first_places(given.cpu(), 2, tables.cpu(), 1024, 50), strict=True):
        assert torch.equal(found.cpu(), expected)
        assert found.dtype == torch.int32


def test_paths_go_on_from_their_chains():
    free = torch.tensor([10, 20], dtype=torch.int32, device=DEVICE)
    chain = torch.tensor([[0, 0, 0], [0, 0, 0]], device=DEVICE)
    first = kernel.longer_paths(free.new_empty(2, 1, 0), chain, free, 0)
    assert first.tolist() == [[[10], [11], [12]], [[20], [21], [22]]]
    chain = torch.tensor([[2, 0], [1, 1]], device=DEVICE)
    second = kernel.longer_paths(first, chain, free, 3)
    assert second.tolist() == [[[12, 13], [10, 14]], [[21, 23], [21, 24]]]
    alike = torch.arange(2, device=DEVICE).expand(2, 2)  # one row for the whole batch
    third = kernel.longer_paths(second, alike, free, 5)
    assert third.tolist() == [[[12, 13, 15], [10, 14, 16]], [[21, 23, 25], [21, 24, 26]]]
    assert torch.equal(third.cpu(), keys.extend_paths(second.cpu(), alike.cpu(), free.cpu(), 5))


@pytest.mark.parametrize("width", [36, 64, 576])
@pytest.mark.parametrize("normed", [False, True])
def test_embeddings_and_features_side_by_side(width, normed):
    table, features = noise(50, width).to(torch.float32), noise(3, 4, 2 * width, seed=1, scale=3)[..., width:]
    tokens, chain = numbers(50, 3, 9)[:, 2:7], numbers(4, 3, 5, seed=1)
    weights = (noise(width, seed=2), noise(width, seed=3)) if normed else (None, None)
    x, raw = kernel.enter(tokens, table, features, chain, *weights, 1e-5)
    taken = features.take_along_dim(chain[..., None], 1)
    assert torch.equal(raw, taken)
    both = [table[tokens].to(DTYPE), taken]
    close(x, torch.cat([rms(v, w) if normed else v for v, w in zip(both, weights, strict=True)], -1))
    rows = table[tokens][:, :4].flatten(0, 1)  # looked up already, and no chain
    again, _ = kernel.enter(None, rows, features, None, *weights, 1e-5)
    close(again[..., :width], x[:, :4, :width])
    close(again[..., width:], rms(features, weights[1]) if normed else features)


@pytest.mark.parametrize(("heads", "kv", "d"), [(9, 3, 64), (4, 4, 6), (6, 2, 20)])
@pytest.mark.parametrize("w", [0, 1, 3])
def test_rotation_into_the_cache(heads, kv, d, w):
    b, n, scale = 2, 3, 1.25
    qkv = noise(b, n, (heads + 2 * kv) * d + 8)[..., :-8]
    frequencies = 10000 ** -(torch.arange(0, d, 2, device=DEVICE).float() / d)
    positions = numbers(3000, b, 1).int().expand(b, n) + torch.arange(n, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([4, 1], dtype=torch.int32, device=DEVICE)
    columns = torch.tensor([[[17, 0], [3, 0], [39, 0]], [[0, 0], [5, 0], [4, 0]]], dtype=torch.int32, device=DEVICE)
    columns = columns[..., 0]  # as the last of paths
    stored, values = torch.zeros(5, kv, 40, d, dtype=DTYPE, device=DEVICE), noise(5, kv, 40, d, seed=9)
    before = values.clone()
    query = pieces.turn(qkv, positions, frequencies, scale, stored, values, rows, columns, w)

    split = qkv.double().unflatten(-1, (-1, d)).split((heads, kv, kv), 2)  # (b, n, ·, d)
    angles = positions.double()[..., None, None] * frequencies.double()

    def rotated(x):
        pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.full_like(angles, scale), angles)
        return torch.cat((pairs.real, pairs.imag), -1)

    close(query, rotated(split[0])[:, n - w :].transpose(1, 2), rtol=0.01, atol=0.01)
    expected = torch.zeros_like(stored, dtype=torch.float64), before.double()
    for s in range(b):
        for i in range(n):
            place = (int(rows[s]), slice(None), int(columns[s, i]))
            expected[0][place], expected[1][place] = rotated(split[1])[s, i], split[2][s, i]
    close(stored, expected[0], rtol=0.01, atol=0.01)
    close(values, expected[1], rtol=0, atol=0)
    if w == n:  # the same of cosines and sines
        tables = [(f(angles[:, :, 0]) * scale).repeat(1, 1, 2).float() for f in (torch.cos, torch.sin)]
        again = torch.zeros_like(stored), before.clone()
        close(pieces.turn_by(qkv, *tables, *again, rows, columns), query, rtol=0.01, atol=0.01)
        close(again[0], stored, rtol=0.01, atol=0.01)
        assert torch.equal(again[1], values)


@pytest.mark.parametrize("width", [36, 576])
def test_what_follows_a_product(width):
    x, residual, weight = noise(3, 2, width), noise(3, 5, 2 * width, seed=1)[:, 3:, width:], noise(width, seed=2)
    total, normed = kernel.add_norm(x, residual, weight, 1e-5)
    close(total, x.double() + residual.double(), rtol=0.01, atol=0.01)
    close(normed, rms(total, weight))
    wide = noise(3, 2, 2 * width, scale=4)
    gate, up = wide.double().chunk(2, -1)
    close(pieces.gated(wide), functional.silu(gate) * up)
    y, chain = noise(3, 4, width, seed=3, scale=4), numbers(4, 3, 2, seed=3)
    taken = y.take_along_dim(chain[..., None], 1).double()
    close(kernel.silu_sum(x, y, chain), functional.silu(x.double() + taken))
    close(kernel.silu_sum(x[:, 0], y[:, 0], None), functional.silu(x[:, 0].double() + y[:, 0].double()))
    shift, shifted = noise(3, 1, width, seed=4), noise(3, 1, width, seed=5)
    block = x.double() + shift.double() + functional.silu(y[:, :2].double() + shifted.double())
    close(kernel.add_silu(x, y[:, :2], shift, shifted), block)
    close(kernel.add_silu(x[0], y[0, :2], None, None), x[0].double() + functional.silu(y[0, :2].double()))
    side_by_side = torch.cat((x, y[:, :2]), -1).chunk(2, -1)
    close(kernel.add_silu(*side_by_side, shift, shifted), block)


# ---- whole heads


def two_drafters(kind, sizes, model, options):
    """The same head twice: in half precision on the device, and in double precision on the host."""
    model = tiny_model(**{"family": "llama", "seed": 3, **model}).to(DTYPE)
    half = HEADS[kind].fresh(deepcopy(model).to(DEVICE), dtype=DTYPE, **sizes)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in half.parameters():
            loud = 0.15 if weight.ndim == 2 else 0.3
            weight.copy_((weight.ndim == 1) + loud * torch.randn(weight.shape, generator=random))
    double = HEADS[kind].fresh(model.double(), dtype=torch.float64, **sizes)
    double.load_state_dict({name: value.cpu() for name, value in half.state_dict().items()})
    found = []
    for head in (half, double):
        lent = SimpleNamespace(embedding=head.lender.embedding, lm_head=head.lender.lm_head)
        target = SimpleNamespace(
            model=SimpleNamespace(
                config=model.config,
                get_input_embeddings=lambda lent=lent: lent.embedding,
                get_output_embeddings=lambda lent=lent: lent.lm_head,
            )
        )
        found.append(drafters.make(kind, target, drafter_path=head, **options))
    return found


ODD = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 50}
STRETCHED = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
LAYERS = {
    "eagle": ("eagle", {}, {}),
    "eagle, odd sizes, biases": ("eagle", {"qkv_bias": True}, ODD),
    "eagle3": ("eagle3", {}, {}),
    "eagle3, odd sizes, stretched positions": ("eagle3", {"norm_before_residual": True, **STRETCHED}, ODD),
    "eagle3, scaled embeddings, another activation": (
        "eagle3",
        {"norm_before_fc": True, "hidden_act": "gelu"},
        {"family": "gemma"},
    ),
    "eagle3, a window, norms of states and of what is handed on": (
        "eagle3",
        {"windows": (3,), "fc_norm": True, "norm_output": True, "qkv_bias": True, "o_bias": True},
        {},
    ),
    "eagle3, two layers, normed queries": ("eagle3", {"num_hidden_layers": 2, "qk_norm": True}, {}),
}


def in_pages(drafter):
    """Let a drafter keep its keys in the pages of texts, those of rows 1, 2 and 3, which lie in another order."""
    shape = LayerShape(1, 16, 16, drafter.head.dtype, drafter.device)
    pages = Arena([shape], 4 * PAGE, share=1e-3)
    target = SimpleNamespace(arena=pages, add_layers=lambda *given: pages.add(*given, lambda: None))
    config, room = drafter.head.config, drafter.room()[0]
    drafter.cache = keys.PagedKeys(target, config, drafter.head.dtype, drafter.device, room, 4)
    texts = [pages.open() for _ in range(4)]
    for text in (texts[3], texts[1], texts[2]):
        drafter.cache.reach(text, 0, 7)
    assert [text.pages for text in texts] == [[], [2], [3], [1]]


@torch.inference_mode()
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("name", LAYERS)
def test_drafts_are_those_of_the_modules_in_double_precision(name, pages):
    """Three sequences: a text is read, then what waits, of uneven length, then three depths of chains."""
    kind, sizes, model = LAYERS[name]
    hidden = model.get("hidden_size", 32)
    pair = two_drafters(kind, sizes, model, {"depth": 4, "width": 3})
    read = noise(3, 7, hidden * (3 if kind == "eagle3" else 1), seed=5)
    given = torch.tensor([[1, 4, 2, 0, 7, 8], [3, 4, 3, 8, 7, 6], [2, 4, 1, 0, 0, 5]])
    text = numbers(VOCABULARY, 1, 4, seed=6)
    seen = []
    for drafter in pair:
        device, dtype = drafter.device, drafter.head.dtype
        if pages and drafter is pair[0]:
            in_pages(drafter)
        for _ in range(3):
            drafter.cache.open()
        drafter._make_room(3, 7)
        places = torch.arange(4, dtype=torch.int32, device=device)[None]
        for row in (1, 2, 3):
            columns = drafter.cache.columns(row, places)
            where = torch.tensor([row], dtype=torch.int32, device=device)
            where = drafter.cache.through(where, columns, None, None, places)
            features = drafter.head.read(read[row - 1 :][:1, :4].to(device, dtype))
            nothing, _ = drafter.head.draft(text.to(device), features, None, places, where)
            assert nothing.shape[1] == 0  # nobody looked
        with StandIns(drafter.head).in_place():
            carry = drafter.start(given.to(device), read[:, 4:].to(device, dtype))
            found = [carry.features, drafter.logits(carry, 0)]
            for depth, chain in enumerate(([[0, 0, 0]] * 3, [[2, 0, 0], [0, 1, 2], [1, 1, 1]], [[0, 1, 2]] * 3), 1):
                tokens = numbers(VOCABULARY, 3, 3, seed=depth).to(device)
                carry = drafter.advance(carry, torch.tensor(chain, device=device), tokens, depth)
                found += [carry.features, drafter.logits(carry, depth)]
        assert carry.features.shape == (3, 3, hidden)
        assert carry.used == 9
        for sequence, row in sorted(enumerate(given[:, 0].tolist()), key=lambda pair: pair[1]):
            end, stored, drafted = 4 + int(given[sequence, 2]), row, torch.arange(9, device=device)
            columns = drafter.cache.columns(row, torch.arange(end, device=device))
            if drafter.cache.tables is None:
                drafted += end
            else:
                stored, drafted = 0, drafted + drafter.cache.spare + sequence * drafter.cache.room
            every = torch.cat((columns, drafted))
            found += [x[stored][:, every] for x in drafter.cache.layers[0]]  # what is written
        seen.append(found)
    for half, double in zip(*seen, strict=True):
        assert half.dtype == DTYPE
        loud = float(double.abs().max())
        close(half / loud, double / loud, rtol=0, atol=0.05 if CUDA else 0.008)


@torch.inference_mode()
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sizes", [{}, {"window": 0, "feedback": False}], ids=["few keys", "all keys, no feedback"])
def test_drafts_of_the_targets_last_layers(sizes):
    """Three sequences whose texts go beyond the window: read, then what waits, of uneven length, then two depths."""
    pair = two_drafters("spire", {"layers": 2, "window": 3, **sizes}, {}, {"depth": 3, "width": 3})
    read = noise(3, 7, 64, seed=5)
    given = torch.tensor([[1, 4, 2, 0, 7, 8], [3, 4, 3, 8, 7, 6], [2, 4, 1, 0, 0, 5]])
    seen = []
    for drafter in pair:
        device, dtype = drafter.device, drafter.head.dtype
        for _ in range(3):
            drafter.cache.open()
        drafter._make_room(3, 7)
        places = torch.arange(4, dtype=torch.int32, device=device)[None]
        for row in (1, 2, 3):
            where = torch.tensor([row], dtype=torch.int32, device=device)
            states = read[row - 1 :][:1, :4].to(device, dtype)
            drafter.remember(SimpleNamespace(length=0), places, states, where, places)
        with StandIns(drafter.head).in_place():
            carry = drafter.start(given.to(device), read[:, 4:].to(device, dtype))
            found = [carry.normed, drafter.logits(carry, 0)]
            for depth, chain in enumerate(([[0, 0, 0]] * 3, [[2, 0, 0], [0, 1, 2], [1, 1, 1]]), 1):
                tokens = numbers(VOCABULARY, 3, 3, seed=depth).to(device)
                carry = drafter.advance(carry, torch.tensor(chain, device=device), tokens, depth)
                found += [carry.normed, drafter.logits(carry, depth)]
        assert carry.used == 1 + 6
        seen.append(found)
    for half, double in zip(*seen, strict=True):
        assert half.dtype == DTYPE
        loud = float(double.abs().max())
        close(half / loud, double / loud, rtol=0, atol=0.05 if CUDA else 0.02)


@torch.inference_mode()
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rnn", [True, False])
@pytest.mark.parametrize("exit_dim", [32, 40, 64])
def test_beams_of_a_recurrent_head(exit_dim, rnn):
    half, double = two_drafters("redrafter", {"exit_dim": exit_dim, "rnn": rnn}, {}, {"beams": 3, "length": 3})
    ids = torch.arange(1, VOCABULARY, 3)
    half.head.guess_only(ids)
    states, roots = noise(2, 32, seed=5), numbers(VOCABULARY, 2, seed=6)
    chains = torch.tensor([[[0, 0, 0]] * 2, [[2, 0, 0], [1, 1, 2]]], device=DEVICE)
    with StandIns(half.head).in_place():
        carry = half.start(states, roots)
        found = [half.logits(carry, 0), half.few(carry, 0)]
        for depth, chain in enumerate(chains, 1):
            carry = half.advance(carry, chain, numbers(VOCABULARY, 2, 3, seed=depth), depth)
            found += [half.logits(carry, depth), half.few(carry, depth)]
    head, h = double.head, states.cpu().double()
    memory = head.start(h, roots.cpu())[:, None]
    expected = [head.logits(h[:, None], memory)]
    for depth, chain in enumerate(chains.cpu(), 1):
        before = memory.take_along_dim(chain[..., None], 1)
        memory = head.advance(before, numbers(VOCABULARY, 2, 3, seed=depth).cpu())
        expected.append(head.logits(h[:, None].expand_as(memory), memory))
    expected = [x for whole in expected for x in (whole, whole[..., ids])]
    for a, b in zip(found, expected, strict=True):
        loud = float(b.abs().max())
        close(a / loud, b / loud, rtol=0, atol=0.03 if CUDA else 0.005)


@pytest.mark.usefixtures("kernels")
def test_whoever_needs_gradients_gets_them():
    block = base.Residual(32).to(DEVICE, DTYPE)
    x = noise(2, 32).requires_grad_()
    block(x).sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        close(block(x.detach()), x.double() + functional.silu(block.linear(x).double()))


# ---- launches


class Launches(TorchDispatchMode):
    """Names of operations that are more than a view: on a GPU a launch each, but for attention, which is two."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        result = function(*args, **(kwargs or {}))
        if name not in ("empty", "new_empty", "lift_fresh") and not (function.is_view and shares(result, args[0])):
            self.names.append(name)
        return result


def shares(result, given):
    """Whether a view is one: some copy if they must."""
    some = result if isinstance(result, torch.Tensor) else result[0]
    return some.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


@torch.library.custom_op("slipstream_tests::mix", mutates_args=())
def mix(query: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """In the place of attention: depends on the text, whose first key was written by then."""
    return query.transpose(1, 2) + values[:, :, 0].mean()


@mix.register_fake
def _mixed(query, _values):
    return query.transpose(1, 2).contiguous()


def ready(kind, monkeypatch):
    """A drafter in half precision, and what it starts from."""
    (drafter, _) = two_drafters(kind, {}, {}, {} if kind == "redrafter" else {"depth": 3, "width": 3})
    monkeypatch.setattr(keys, "masked_attention", lambda query, _, values, *__: mix(query, values))
    if kind == "redrafter":
        return drafter, (noise(1, 32), numbers(VOCABULARY, 1))
    drafter.cache.open()
    drafter._make_room(1, 4)
    states = noise(1, 3, 32 * (3 if kind == "eagle3" else 1))
    return drafter, (torch.tensor([[1, 0, 2, 0, 4, 5]], device=DEVICE), states)


LAYER = ["linear", "turn", "mix", "linear", "add_norm", "linear", "gated", "linear"]
LAUNCHES = {  # to start, to read one more depth, and to say what follows
    "eagle3": (
        ["first_places", "linear", "enter", *LAYER, "add_norm"],
        ["extend_paths", "enter", *LAYER, "add_norm"],
        ["linear"],
    ),
    "eagle": (
        ["first_places", "enter", "linear", *LAYER, "add"],
        ["extend_paths", "enter", "linear", *LAYER, "add"],
        ["linear"],
    ),
    "redrafter": (
        ["linear", "linear", "embedding", "zeros_like", "linear", "linear", "silu_sum"],
        ["embedding", "linear", "linear", "silu_sum"],
        ["linear", "add_silu", "linear", "add_silu", "linear"],
    ),
}


@torch.inference_mode()
@pytest.mark.skipif(CUDA, reason="counts operations on the host")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", LAUNCHES)
def test_a_depth_takes_few_launches(kind, monkeypatch):
    drafter, given = ready(kind, monkeypatch)
    chain, tokens = numbers(1, 1, 3), numbers(VOCABULARY, 1, 3)
    with StandIns(drafter.head).in_place():
        with Launches() as start:
            carry = drafter.start(*given)
        with Launches() as advance:
            carry = drafter.advance(carry, chain, tokens, 1)
        drafter.logits(carry, 1)  # what is made once is made by now
        with Launches() as logits:
            drafter.logits(carry, 1)
    assert (start.names, advance.names, logits.names) == LAUNCHES[kind]


@torch.inference_mode()
@pytest.mark.skipif(CUDA, reason="counts operations on the host")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("exit_dim", [32, 40])
def test_the_likely_tokens_take_no_more_launches_than_all(exit_dim):
    drafter, _ = two_drafters("redrafter", {"exit_dim": exit_dim}, {}, {})
    drafter.head.guess_only(range(0, VOCABULARY, 2))
    with StandIns(drafter.head).in_place():
        carry = drafter.start(noise(1, 32), numbers(VOCABULARY, 1))
        drafter.few(carry, 0)
        with Launches() as few:
            drafter.few(carry, 0)
    assert few.names == LAUNCHES["redrafter"][2]
