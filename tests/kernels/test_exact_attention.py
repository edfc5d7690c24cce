"""Exact attention: it is attention, and a row's bits follow from its own token path alone.

Run as a program on a GPU it prints how long a call takes.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from device import CUDA, DEVICE, triton

from slipstream.kernels import exact_attention as exact
from slipstream.kernels.ops import gathered_attention
from slipstream.kernels.sizes import PAGE, TILE, WIDE

# The interpreter's: e^2x in a soft cap may be infinite, log 0 too, and rows beside the one looked at not a number.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:All-NaN"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32] if CUDA else [torch.float16, torch.float32]
EXACT_DTYPES = DTYPES if CUDA else [torch.float32]  # a kernel's other dtypes differ in their products alone
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 3e-5}
# About a block's and a split's ends, and beyond a chunk of splits where that doesn't take minutes.
LENGTHS = [0, 1, 31, 32, 127, 128, 129, 255, 256, 700] + ([1023, 1024, 1500, 5000] if CUDA else [])


@dataclass(frozen=True)
class Heads:
    query: int
    key: int
    d: int
    dv: int


PAIR, SMALL, GROUPED = Heads(2, 1, 64, 64), Heads(2, 2, 64, 64), Heads(6, 2, 64, 64)
ODD, LARGE = Heads(3, 1, 80, 96), Heads(8, 1, 128, 128)
MANY = Heads(20, 1, 16, 16)  # more grouped heads than a tile has rows
LLAMA_2, LLAMA_3, SMOL = Heads(32, 32, 128, 128), Heads(32, 8, 128, 128), Heads(9, 3, 64, 64)
GEMMA = Heads(8, 4, 256, 256)

FULL, WINDOW, NARROW, CAPPED = {}, {"window": 100}, {"window": 5}, {"soft_cap": 2.0}
OPTIONS = [FULL, WINDOW, NARROW, CAPPED]
KINDS = [*product([GROUPED], OPTIONS), (SMALL, FULL), (ODD, FULL), (LARGE, CAPPED), (MANY, NARROW)]
if CUDA:  # each kind is compiled in every dtype, so not all combinations
    KINDS += [(LLAMA_2, FULL), (LLAMA_3, WINDOW), (SMOL, FULL), (GEMMA, {"window": 100, "soft_cap": 50.0})]


def noise(*size, seed, dtype):
    return torch.randn(*size, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dtype)


def attend(query, keys, values, rows, lengths, depths, paths, **options):
    """Through a scratch that begins as nonsense."""
    b, heads, n, d = query.shape
    tables, tiles = options.get("tables"), options.get("tiles")
    longest = keys.shape[2] if tables is None else tables.shape[1] * PAGE
    size = (b, n, heads, keys.shape[1], longest, paths.shape[2], values.shape[3])
    room = exact.scratch(*size, DEVICE, 0 if tiles is None else len(tiles), options.get("tile", TILE))
    room.stats.fill_(torch.nan)
    room.sums.fill_(torch.nan)
    inputs = (query, keys, values, rows, lengths, depths, paths)
    return exact.exact_attention(*inputs, room, scale=d**-0.5, **options)


def some_depths(rng, deepest, size):
    """One in some is padding."""
    depths = rng.integers(-1, deepest, size)
    return np.where(depths < 0, -2, depths)


class Text:
    """Tokens as one layer's attention sees them, by absolute position."""

    def __init__(self, heads, dtype, size, seed=0):
        self.heads, self.dtype = heads, dtype
        self.queries = noise(heads.query, size, heads.d, seed=seed, dtype=dtype) * 2
        self.keys = noise(heads.key, size, heads.d, seed=seed + 1, dtype=dtype)
        self.values = noise(heads.key, size, heads.dv, seed=seed + 2, dtype=dtype)

    def row(self, length, depth, *, n=1, row=0, sequences=1, index=0, spare=0, deepest=20, seed=None, **options):
        """(heads, dv) the output at position length + depth, with `length` tokens committed, as row `row` of n of
        sequence `index`. Without a seed the path is a chain behind the text; with one it is scattered, and what lies
        beside it is other text."""
        h, end = self.heads, length + depth + 1
        capacity = end + spare
        rng = np.random.default_rng(seed or 0)
        columns = np.arange(length, end)
        if seed is not None:
            columns = rng.permutation(np.arange(length, capacity))[: depth + 1]
        rows = rng.permutation(sequences + 1)[:sequences]
        lengths = rng.integers(0, capacity - deepest, sequences) if sequences > 1 else np.array([length])
        depths = some_depths(rng, deepest, (sequences, n))
        paths = rng.integers(0, capacity, (sequences, n, deepest))
        lengths[index], depths[index, row] = length, depth
        paths[index, row, : depth + 1] = columns

        query = noise(sequences, h.query, n, h.d, seed=7, dtype=self.dtype)
        query[index, :, row] = self.queries[:, end - 1]
        keys = noise(sequences + 1, h.key, capacity, h.d, seed=8, dtype=self.dtype)
        values = noise(sequences + 1, h.key, capacity, h.dv, seed=9, dtype=self.dtype)
        for cache, known in ((keys, self.keys), (values, self.values)):
            mine = cache[int(rows[index])]
            mine.fill_(torch.nan)  # whatever isn't on the path must not be read, let alone count
            mine[:, :length] = known[:, :length]
            mine[:, torch.from_numpy(columns).to(DEVICE)] = known[:, length:end]
        integers = [torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in (rows, lengths, depths, paths)]
        return attend(query, keys, values, *integers, **options)[index, row]


def same_bits(one, other):
    assert not one.isnan().any()
    whole = {2: torch.int16, 4: torch.int32}[one.element_size()]
    assert torch.equal(one.view(whole), other.view(whole))


def random_inputs(heads, lengths, n, deepest, dtype, seed):
    rng = np.random.default_rng(seed)
    b, capacity = len(lengths), max(lengths) + n + int(rng.integers(0, 200))
    depths = some_depths(rng, deepest, (b, n))
    paths = np.stack([rng.integers(length, capacity, (n, deepest)) for length in lengths])
    integers = [rng.permutation(b + 1)[:b], np.array(lengths), depths, paths]
    query = noise(b, n, heads.query, heads.d, seed=seed, dtype=dtype).transpose(1, 2)
    keys = noise(b + 1, heads.key, capacity, heads.d, seed=seed + 1, dtype=dtype)
    values = noise(b + 1, heads.key, capacity, heads.dv, seed=seed + 2, dtype=dtype)
    return query, keys, values, *[torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in integers]


# ---- it is attention

CASES = [(*kind, *size) for kind, size in product(KINDS, [(1, 1), (7, 20), (40, 3)])]
if not CUDA:  # one of the three sizes for every kind
    CASES = [CASES[3 * i + i % 3] for i in range(len(KINDS))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "options", "n", "deepest"), CASES, ids=str)
def test_it_is_attention(heads, options, n, deepest, dtype):
    lengths = LENGTHS if CUDA else [LENGTHS[(n + heads.query) % 10], 60]
    inputs = random_inputs(heads, lengths, n, deepest, dtype, seed=n)
    found = attend(*inputs, **options)
    query, keys, values, *rows = inputs
    for i in range(len(lengths)):  # one at a time: every row gathers all its keys
        one = [x[i : i + 1] for x in (query, *rows)]
        expected = gathered_attention(one[0], keys, values, *one[1:], scale=heads.d**-0.5, **options)
        torch.testing.assert_close(found[i : i + 1], expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    assert not found[inputs[5] < 0].any(), "padding gives zeros"


@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_attention_at_every_length(length):
    inputs = random_inputs(SMALL, [length], 3, 40, torch.float32, seed=length)
    torch.testing.assert_close(attend(*inputs), gathered_attention(*inputs, scale=0.125), atol=1e-5, rtol=1e-5)


def test_caches_may_lie_in_memory_in_any_order_and_the_scratch_may_be_larger():
    query, keys, values, *integers = random_inputs(GROUPED, [130, 40], 5, 6, torch.float32, seed=1)
    expected = attend(query, keys, values, *integers)
    strided = [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (keys, values)]
    tables = [torch.cat([x, x], 1)[:, :5] for x in integers[2:]]
    room = exact.scratch(3, 16, 6, 2, 1000, 20, 64, DEVICE)
    found = exact.exact_attention(query, *strided, *integers[:2], *tables, room, scale=0.125)
    same_bits(found, expected)


def test_a_scratch_that_is_too_small_is_refused():
    inputs = random_inputs(SMALL, [40], 5, 6, torch.float32, seed=1)
    with pytest.raises(AssertionError, match="smaller shape"):
        exact.exact_attention(*inputs, exact.scratch(1, 4, 2, 2, 40, 6, 64, DEVICE), scale=0.125)


# ---- the law: a row's bits follow from its own path

# How a row may be computed, other than as the only row of a chain, in a cache just large enough.
WAYS = {
    "in a tree": {"n": 5, "seed": 1},
    "in another row": {"n": 16, "row": 15, "seed": 2},
    "among 64 rows": {"n": 64, "row": 37, "seed": 3},
    "in a larger cache": {"spare": 2000, "seed": 4},
    "one of 4 sequences": {"sequences": 4, "index": 2, "n": 3, "row": 1, "seed": 5},
    "beside deeper rows": {"n": 3, "deepest": 70, "seed": 6},
}
POSITIONS = [0, 5, 31, 32, 70, 127, 128, 140, 257, 700] + ([1023, 1024, 1040, 3000] if CUDA else [])


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "options"), KINDS if CUDA else [*product([PAIR], OPTIONS)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits(way, heads, options, dtype):
    one = POSITIONS[(4 * [*WAYS].index(way) + len(str(options))) % len(POSITIONS)]  # in the interpreter's time
    for position in POSITIONS if CUDA else [one]:
        text, depth = Text(heads, dtype, position + 1), min(position, 13)
        alone = text.row(position, 0, **options)
        same_bits(text.row(position - depth, depth, **{"spare": 90, **WAYS[way], **options}), alone)


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_who_computes_what_does_not_matter(dtype, monkeypatch):
    inputs = random_inputs(Heads(10, 5, 64, 64), [300, 65], 3, 40, dtype, seed=3)
    expected = attend(*inputs)
    for shared, own in [(1, 1), (7, 7), (10**6, 10**6)]:  # all splits and as many key heads as fit in one program
        monkeypatch.setattr(exact, "SHARED", shared)
        monkeypatch.setattr(exact, "OWN", own)
        same_bits(attend(*inputs)[inputs[5] >= 0], expected[inputs[5] >= 0])


# ---- pages, pieces of prompts, and rows of several sequences in one list


def in_pages(texts, spare=3, seed=0):
    """keys, values (1, kv, columns, d) with each text's pages anywhere, and the table of them; what isn't text is not a
    number."""
    h, rng = texts[0].heads, np.random.default_rng(seed)
    counts = [-(-(text.keys.shape[1]) // PAGE) + 1 for text in texts]
    where = rng.permutation(sum(counts) + spare)
    table = np.zeros((len(texts), max(counts)), np.int32)
    keys = torch.full((1, h.key, len(where) * PAGE, h.d), torch.nan, dtype=texts[0].dtype, device=DEVICE)
    values = torch.full((1, h.key, len(where) * PAGE, h.dv), torch.nan, dtype=texts[0].dtype, device=DEVICE)
    for i, text in enumerate(texts):
        table[i, : counts[i]] = where[sum(counts[:i]) : sum(counts[: i + 1])]
        columns = torch.from_numpy(columns_of(table[i], np.arange(text.keys.shape[1]))).to(DEVICE)
        keys[0][:, columns], values[0][:, columns] = text.keys, text.values
    return keys, values, torch.from_numpy(table).to(DEVICE)


def columns_of(pages, positions):
    return pages[positions // PAGE].astype(np.int64) * PAGE + positions % PAGE


def of_list(keys, values, table, texts, rows, n, groups=None, **options):
    """(n, heads, dv) for rows (sequence, length, position): a chain after `length` tokens of text; length None: it is
    all text, as in a prompt. The rest is padding. groups: rows belong to several sequences, in order."""
    h, deepest = texts[0].heads, 1 + max((p - (p if length is None else length) for _, length, p in rows), default=0)
    integers = np.zeros((3, 1, n), np.int32)
    integers[2] = -2
    paths = np.zeros((1, n, deepest), np.int32)
    query = noise(1, h.query, n, h.d, seed=3, dtype=texts[0].dtype)
    for i, (sequence, length, position) in enumerate(rows):
        query[0, :, i] = texts[sequence].queries[:, position]
        integers[:, 0, i] = sequence, position + 1 if length is None else length, -1
        if length is not None:
            integers[2, 0, i] = position - length
            pages = table[sequence].cpu().numpy()
            paths[0, i, : position - length + 1] = columns_of(pages, np.arange(length, position + 1))
    tiles = None
    if groups is not None:
        firsts = {s: next(i for i, row in enumerate(rows) if row[0] == s) for s, *_ in rows}
        counts = {s: sum(row[0] == s for row in rows) for s in firsts}
        lines = [(firsts[s], k) for s in firsts for k in range(-(-counts[s] * groups // options.get("tile", TILE)))]
        tiles = torch.tensor(lines + [(-1, 0)] * (n - len(lines)), dtype=torch.int32, device=DEVICE)
    given = [torch.from_numpy(x).to(DEVICE) for x in (*integers, paths)]
    return attend(query, keys, values, *given, tables=table, tiles=tiles, **options)[0]


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
@pytest.mark.parametrize("options", [FULL, WINDOW], ids=str)
@pytest.mark.parametrize("shared", [1, 512])
def test_pages_pieces_and_lists_of_rows_keep_the_bits(shared, options, dtype, monkeypatch):
    """Three texts in pages: each row, read as a piece of a prompt, as a node of a chain, alone or among the others,
    has the bits that it has as the only row of a cache of its own; by many programs or by one."""
    monkeypatch.setattr(exact, "SHARED", shared)
    heads = GROUPED if CUDA else PAIR
    ends = (1500, 700, 40) if CUDA else (290, 150, 40)
    texts = [Text(heads, dtype, end, seed=10 * i) for i, end in enumerate(ends)]
    keys, values, table = in_pages(texts)
    alone = {(s, p): texts[s].row(p, 0, **options) for s, end in enumerate(ends) for p in (end - 1, end - 9, end // 2)}
    lone = lambda rows, n: of_list(keys, values, table, texts, rows, n, **options)  # noqa: E731
    last = ends[0] - 1
    piece = lone([(0, None, p) for p in range(last - 19, last + 1)], 24)  # pages of the text alone are read
    same_bits(piece[19], alone[0, last])
    same_bits(piece[11], alone[0, last - 8])
    same_bits(lone([(0, last - 8, p) for p in range(last - 8, last + 1)], 16)[8], alone[0, last])
    groups = heads.query // heads.key
    rows = [(s, end - 9, p) for s, end in enumerate(ends) for p in (end - 9, end - 1)]
    rows[4:] = [(2, None, p) for p in range(30, 40)]  # a piece of a prompt among them
    together = of_list(keys, values, table, texts, rows, 16, groups, **options)
    for i, (s, _, p) in enumerate(rows):
        if (s, p) in alone:
            same_bits(together[i], alone[s, p])
    assert not together[len(rows) :].any(), "padding gives zeros"


def shares(text, position, *, window=None, soft_cap=None):
    """(heads, pages) which share of its weights the token there has on each page: one softmax, in float64."""
    h = text.heads
    query = text.queries[:, position].double().view(h.key, -1, 1, h.d)
    scores = (query @ text.keys[:, None, : position + 1].double().transpose(2, 3))[:, :, 0] * h.d**-0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if window is not None:
        scores[..., : max(0, position + 1 - window)] = -torch.inf
    weights = scores.softmax(-1).flatten(0, 1)
    return torch.nn.functional.pad(weights, (0, -weights.shape[1] % PAGE)).unflatten(1, (-1, PAGE)).sum(2)


MEASURED = [*product([PAIR], OPTIONS), (GROUPED, FULL)]
if CUDA:
    MEASURED += [(MANY, WINDOW), (LLAMA_3, FULL), (SMOL, FULL), (GEMMA, {"window": 100, "soft_cap": 50.0})]


@pytest.mark.parametrize("dtype", DTYPES if CUDA else [torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "options"), MEASURED, ids=str)
@pytest.mark.parametrize(("shared", "tile"), [(1, TILE), (512, TILE)] + ([(512, WIDE)] if CUDA else []))
def test_shares_of_the_weight_that_roots_have_on_pages(shared, tile, heads, options, dtype, monkeypatch):
    """Three texts, whose roots stand within a block, at the end of a page, and at the beginning of the text; by many
    programs and by one, which merges splits. Shares of two layers add up. Measured or not, the bits are the same.
    """
    monkeypatch.setattr(exact, "SHARED", shared)
    roots = (9000 if CUDA else 170, 127, 0)  # on a GPU, beyond splits of one page
    texts = [Text(heads, dtype, root + 2, seed=10 * i) for i, root in enumerate(roots)]
    keys, values, table = in_pages(texts)
    rows = [(s, root, p) for s, root in enumerate(roots) for p in (root, root + 1)]
    n, groups = 7, heads.query // heads.key
    quiet = of_list(keys, values, table, texts, rows, n, groups, tile=tile, **options)
    block_weights = torch.full((table.shape[1] * PAGE // exact.BLOCK, n, heads.query), torch.nan, device=DEVICE)
    page_shares = torch.zeros((n, heads.query, table.shape[1]), device=DEVICE)
    for layers in (1, 2):
        measure = {"block_weights": block_weights, "page_shares": page_shares}
        same_bits(of_list(keys, values, table, texts, rows, n, groups, tile=tile, **measure, **options), quiet)
        expected = torch.zeros_like(page_shares)
        for i, (s, root, position) in enumerate(rows):
            if position == root:
                found = layers * shares(texts[s], position, **options)
                expected[i, :, : found.shape[1]] = found
        torch.testing.assert_close(page_shares, expected, atol=CLOSE[dtype] / 4, rtol=CLOSE[dtype] / 4)
    lone = torch.zeros_like(page_shares)  # one sequence has no table of tiles
    of_list(
        keys, values, table, texts, rows[:2], n, tile=tile, block_weights=block_weights, page_shares=lone, **options
    )
    torch.testing.assert_close(2 * lone[0], page_shares[0], atol=1e-6, rtol=1e-6)
    assert not lone[1:].any()


def test_splits_are_merged_alike_in_parts_and_whole(monkeypatch):
    """Few heads of rows are merged by several programs each; up to 4 splits at once, or 16."""
    inputs = random_inputs(PAIR, [5000 if CUDA else 900, 300, 33], 2, 9, EXACT_DTYPES[0], seed=3)
    parts = attend(*inputs)
    monkeypatch.setattr(exact, "FEW", 0)
    same_bits(attend(*inputs), parts)
    monkeypatch.setattr(exact, "CHUNKS", (1, 1))
    same_bits(attend(*inputs), parts)


@pytest.mark.parametrize(("heads", "options"), KINDS if CUDA else [(GROUPED, FULL), (LARGE, WINDOW)], ids=str)
@pytest.mark.parametrize("n", [40, 300] if CUDA else [40])
def test_wide_tiles_are_attention(n, heads, options):
    dtype = torch.bfloat16 if CUDA else torch.float16
    inputs = random_inputs(heads, [700, 33] if CUDA else [33], n, 9, dtype, seed=n)
    narrow, wide = attend(*inputs, **options), attend(*inputs, **options, tile=WIDE)
    if CUDA:  # the interpreter's products of 64 rows may be rounded otherwise than those of 16
        same_bits(wide, narrow)
    torch.testing.assert_close(wide, narrow, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.skipif(not CUDA, reason="the interpreter's products of 64 rows may be rounded otherwise than those of 16")
@pytest.mark.parametrize("options", [FULL, WINDOW], ids=str)
@pytest.mark.parametrize("heads", [GROUPED, LLAMA_3, SMOL, MANY], ids=str)
def test_a_row_has_the_same_bits_in_wide_tiles(heads, options):
    """Whose tail blocks are read by a launch of their own, before that of text."""
    for position in (0, 40, 700, 5000, 12000):
        text, depth = Text(heads, torch.bfloat16, position + 1), min(position, 13)
        alone = text.row(position, 0, **options)
        for n, row in ((64, 37), (128, 127)):
            found = text.row(position - depth, depth, n=n, row=row, seed=n, spare=130, tile=WIDE, **options)
            same_bits(found, alone)


@pytest.mark.skipif(not CUDA, reason="the interpreter's products of 64 rows may be rounded otherwise than those of 16")
@pytest.mark.parametrize("shared", [1, 512])
@pytest.mark.parametrize("options", [FULL, WINDOW], ids=str)
@pytest.mark.parametrize("heads", [GROUPED, LLAMA_3, SMOL], ids=str)
def test_pieces_of_prompts_in_wide_tiles_keep_the_bits(heads, options, shared, monkeypatch):
    monkeypatch.setattr(exact, "SHARED", shared)
    texts = [Text(heads, torch.bfloat16, end, seed=10 * i) for i, end in enumerate((4500, 700, 40))]
    keys, values, table = in_pages(texts)
    rows = [(0, None, p) for p in range(4200, 4500)] + [(1, None, p) for p in range(600, 700)] + [(2, 30, 39)]
    groups = heads.query // heads.key
    wide, narrow = (
        of_list(keys, values, table, texts, rows, 512, groups, tile=tile, **options) for tile in (WIDE, TILE)
    )
    same_bits(wide, narrow)


@pytest.mark.skipif(not CUDA, reason="minutes in the interpreter")
@pytest.mark.parametrize("tile", [TILE, WIDE])
@pytest.mark.parametrize("position", [8191, 8192, 8700, 33000, 131000])
def test_long_texts_have_wider_splits(position, tile):
    text = Text(SMALL, torch.bfloat16, position + 1)
    alone = text.row(position, 0)
    keys, values, table = in_pages([text])
    for begin in (position - 40, position - 300):
        rows = [(0, None, p) for p in range(begin, position + 1)]
        piece = of_list(keys, values, table, [text], rows, 512, tile=tile)
        same_bits(piece[position - begin], alone)
    for n in (1, 64):
        chain = of_list(keys, values, table, [text], [(0, position - 90, position)], n, tile=tile)
        same_bits(chain[0], alone)
    expected = torch.nn.functional.scaled_dot_product_attention(
        text.queries[:, -1:].float(), text.keys.float(), text.values.float()
    )
    torch.testing.assert_close(alone.float(), expected[:, 0], atol=CLOSE[torch.bfloat16], rtol=CLOSE[torch.bfloat16])


# The last window reaches back over more splits than are added up at once, and its first one changes meanwhile.
COMMITTED = [(position, options) for position in (19, 70, 128, 135, 259) for options in (FULL, WINDOW)]
COMMITTED += [(1280, {"window": 1150})]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("position", "options"), COMMITTED, ids=str)
def test_committing_text_keeps_the_bits(position, options, dtype):
    """The same token, read when more and more of its path was committed text."""
    text = Text(PAIR, dtype, position + 1)
    alone = text.row(position, 0, **options)
    for depth in range(0, min(position, 80), 3) if CUDA else (1, 7, 13, min(position, 45)):
        found = text.row(position - depth, depth, spare=150, n=2, deepest=depth + 1, seed=depth, **options)
        same_bits(found, alone)


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [SMALL, LLAMA_2, LLAMA_3, SMOL] if CUDA else [SMALL], ids=str)
@pytest.mark.parametrize("length", [0, 120, 250] + ([1010] if CUDA else []))
def test_a_tree_equals_its_paths_decoded_token_by_token(length, heads, dtype):
    parents = [-1, 0, 0, 1, 1, 2, 3, 6, 7, 8, 9, 10, 11, 5] if CUDA else [-1, 0, 0, 1, 3, 4, 5, 6, 7]
    n = len(parents)
    lines = []  # each node's path from the root
    for i, parent in enumerate(parents):
        lines.append([*(lines[parent] if i else []), i])
    h, deepest = heads, max(map(len, lines))
    query = noise(1, h.query, n, h.d, seed=1, dtype=dtype)
    keys = noise(1, h.key, length + n, h.d, seed=2, dtype=dtype)
    values = noise(1, h.key, length + n, h.dv, seed=3, dtype=dtype)
    paths = np.zeros((1, n, deepest), np.int32)
    for i, line in enumerate(lines):
        paths[0, i, : len(line)] = length + np.array(line)
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=DEVICE)  # noqa: E731
    depths = ints([len(line) - 1 for line in lines])
    tree = attend(query, keys, values, ints(0), ints(length), depths, torch.from_numpy(paths).to(DEVICE))
    for i, line in enumerate(lines):
        order = torch.tensor([*range(length), *(length + node for node in line)], device=DEVICE)
        end = length + len(line)
        plain = attend(
            query[:, :, i : i + 1], keys[:, :, order], values[:, :, order], ints(0), ints(end - 1), ints([0]),
            ints([[end - 1]]),
        )  # fmt: skip
        same_bits(tree[0, i], plain[0, 0])


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_graph_follows_the_integers():
    one, other = (random_inputs(GROUPED, [lengths, 300], 16, 9, torch.bfloat16, seed=4) for lengths in (130, 7))
    query, keys, values = one[:3]
    integers = [x.clone() for x in one[3:]]
    room = exact.scratch(2, 16, 6, 2, keys.shape[2], 9, 64, DEVICE)
    call = lambda: exact.exact_attention(query, keys, values, *integers, room, scale=0.125)  # noqa: E731
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for inputs in (one, other, one):
        for mine, theirs in zip(integers, inputs[3:], strict=True):
            mine.copy_(theirs)
        graph.replay()
        same_bits(out, attend(query, keys, values, *inputs[3:]))


# ---- speed, on a GPU


def microseconds(calls):
    """Of one call, from replays of a graph that makes all of them: each reads another cache, as a model's layers do."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (5 * len(calls)))
    return float(np.median(times[2:]))


def case(heads, context, n, dtype=torch.bfloat16):
    """Calls of ours, in narrow and in wide tiles, and of sdpa with a mask, one per layer."""
    length, deepest = context - 13, 16  # a tail block that is more than half full
    capacity, h = context + n + 64, heads
    size = capacity * h.key * (h.d + h.dv) * 2
    layers = max(2, min(32, 400_000_000 // size))  # more than the L2 cache holds
    rng = np.random.default_rng(0)
    parents = [-1] + [int(rng.integers(max(0, i - 6), i)) for i in range(1, n)]
    lines = []
    for i, parent in enumerate(parents):
        lines.append(([*lines[parent], i] if i else [0])[-deepest:])
    paths = np.zeros((1, n, deepest), np.int32)
    width = -(-(length + n) // 16) * 16  # aligned, as sdpa likes it
    mask = np.zeros((1, 1, n, width), np.bool_)
    mask[..., :length] = True
    for i, line in enumerate(lines):
        paths[0, i, : len(line)] = length + np.array(line)
        mask[0, 0, i, length + np.array(line)] = True
    depths = np.array([[len(line) - 1 for line in lines]])
    rows, lengths = np.zeros(1), np.full(1, length)
    integers = [torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in (rows, lengths, depths, paths)]
    query = noise(1, n, h.query, h.d, seed=1, dtype=dtype).transpose(1, 2)
    keys = torch.randn(layers, 1, h.key, capacity, h.d, dtype=dtype, device=DEVICE)
    values = torch.randn(layers, 1, h.key, capacity, h.dv, dtype=dtype, device=DEVICE)
    sizes = 1, n, h.query, h.key, capacity, deepest, h.dv, DEVICE
    rooms = {tile: exact.scratch(*sizes, tile=tile) for tile in (TILE, WIDE)}
    scale, groups = h.d**-0.5, h.query // h.key
    added = torch.zeros(mask.shape, dtype=dtype, device=DEVICE)
    added.masked_fill_(~torch.from_numpy(mask).to(DEVICE), torch.finfo(dtype).min)
    added = added.repeat(1, 1, groups, 1)
    grouped = query.reshape(1, h.key, groups * n, h.d).contiguous()  # heads of one key head as rows

    def ours(layer, tile):
        inputs = query, keys[layer], values[layer], *integers, rooms[tile]
        return lambda: exact.exact_attention(*inputs, scale=scale, tile=tile)

    def sdpa(layer):
        k, v = keys[layer, :, :, :width], values[layer, :, :, :width]
        return lambda: torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=added, scale=scale)

    each = range(layers)
    return [ours(i, TILE) for i in each], [ours(i, WIDE) for i in each], [sdpa(i) for i in each]


class Nothing:
    """A kernel that isn't launched."""

    def __getitem__(self, grid):
        return lambda *_, **__: None


def speed():
    print(torch.cuda.get_device_name(), torch.__version__, "triton", triton.__version__)
    print("microseconds per call, bfloat16; partials: the first of our two launches alone")
    print("heads     context  rows   narrow partials     wide     sdpa")
    combine = exact._combine
    for heads, context, n in product([LLAMA_2, LLAMA_3, SMOL], [512, 8192], [1, 16, 64, 512]):
        narrow, wide, sdpa = case(heads, context, n)
        times = [microseconds(narrow)]
        exact._combine = Nothing()
        times += [microseconds(narrow)]
        exact._combine = combine
        times += [microseconds(wide), microseconds(sdpa)]
        label = f"{heads.query}/{heads.key}x{heads.d}"
        print(f"{label:<9} {context:7} {n:5}", *(f"{t:8.1f}" for t in times), flush=True)


if __name__ == "__main__":
    speed()
