"""`draw` in Triton. Every row is divided into chunks of the vocabulary, so that few rows fill a GPU too.

Noise is applied before the filters, and nothing is sorted. A token is drawn from all; then one pass over the more
probable tokens tells whether it is among the top k and in the nucleus. If it is not, neither are the less probable
ones, and the next token is drawn from the more probable ones. A few passes are enough, however flat the distribution.

`_adjust` applies biases and penalties, where there are any. `_peaks` finds the largest logit of every group of tokens.
At least k tokens are at or above the k-th largest peak: `_floor` finds it, as a lower bound for the top k. `_list` adds
the noise, draws within each chunk, and lists the tokens that top k or nucleus may keep. `_pick`, one program per row,
applies the filters to the list. Weights are integers, so that sums don't depend on the list's order.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.kernels.draw_inputs import Draws, History

# These divide the work among programs and do not change the result.
CHUNK = 2048  # tokens per program
PEAK = 64  # tokens of a group, which has one peak
BLOCK = 2048  # listed tokens read at once

NOBODY = tl.constexpr(0x7FFFFFFF)  # larger than any rank
BEYOND = tl.constexpr(1 << 62)  # larger than any place in the order
ONE = tl.constexpr(2.0**39)  # the weight of a row's most probable token
EXACT = {"enable_fp_fusion": False}  # products and sums are rounded separately, as on a CPU


def draw_rows(logits: torch.Tensor, draws: Draws, history: History | None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `draw.draw`. Launches depend on shapes alone, so a captured CUDA graph can be replayed with other data."""
    b, n, vocabulary = logits.shape
    assert vocabulary < 1 << 24, "a row's weight has 64 bits, and a token 24 of its place in the order"
    assert draws.keys.shape == (b, n, 2), "one key per row"
    assert draws.keys.is_contiguous(), "keys lie side by side"
    if history is not None:
        logits = _with_history(logits, draws, history)
    assert logits.stride(2) == 1, "a row's logits lie side by side"
    chunks, rows, device = -(-vocabulary // CHUNK), b * n, logits.device
    tops = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    peaks = torch.empty((rows, chunks * (CHUNK // PEAK)), dtype=torch.float32, device=device)
    floors = torch.empty(rows, dtype=torch.int32, device=device)
    masses = torch.empty((rows, chunks), dtype=torch.int64, device=device)
    bests = torch.empty((rows, chunks), dtype=torch.float64, device=device)
    winners = torch.empty((rows, chunks), dtype=torch.int64, device=device)
    sizes = torch.empty(rows, dtype=torch.int32, device=device)  # of the list, which is:
    ids = torch.empty((rows, vocabulary), dtype=torch.int32, device=device)
    values = torch.empty((rows, vocabulary), dtype=torch.float32, device=device)
    noisies = torch.empty((rows, vocabulary), dtype=torch.float64, device=device)
    tokens = torch.empty((b, n), dtype=torch.int32, device=device)
    value = torch.empty((b, n), dtype=torch.float32, device=device)
    source = (logits, logits.stride(0), logits.stride(1), n, vocabulary, draws.temperature)
    filters = (draws.top_k, draws.top_p)
    found = (draws.min_p, tops, masses, bests, winners, sizes, ids, values, noisies)
    pad = triton.next_power_of_2(chunks)
    # fmt: off
    _peaks[(chunks, rows)](*source, tops, peaks, sizes, CHUNK=CHUNK, PEAK=PEAK, **EXACT)
    _floor[(rows,)](
        n, vocabulary, draws.temperature, *filters, peaks, peaks.shape[1], floors, BLOCK=BLOCK, num_warps=8, **EXACT
    )
    _list[(chunks, rows)](*source, *filters, *found, draws.keys, floors, CHUNK=CHUNK, PAD=pad, num_warps=8, **EXACT)
    _pick[(rows,)](*source, *filters, *found, chunks, tokens, value, PAD=pad, BLOCK=BLOCK, num_warps=8, **EXACT)
    # fmt: on
    return tokens, value


def _with_history(logits: torch.Tensor, draws: Draws, history: History) -> torch.Tensor:
    """(b, n, V) float32."""
    b, n, vocabulary = logits.shape
    depth = history.paths.shape[2]
    assert logits.stride(2) == 1, "a row's logits lie side by side"
    assert history.prompt.shape == history.emitted.shape == history.bias.shape, "the state has one shape"
    assert history.prompt.shape[1] == vocabulary, "the state covers the vocabulary"
    assert history.depths.shape == (b, n), "one entry per row"
    assert history.paths.shape == (b, n, depth), "one path per row"
    tensors = [history.prompt, history.emitted, history.bias, history.ids, history.depths, history.paths]
    assert all(t.is_contiguous() for t in tensors), "rows lie side by side"
    out = torch.empty((b, n, vocabulary), dtype=torch.float32, device=logits.device)
    # fmt: off
    _adjust[(-(-vocabulary // CHUNK), b * n)](
        logits, logits.stride(0), logits.stride(1), n, vocabulary,
        draws.repetition, draws.presence, draws.frequency,
        history.prompt, history.emitted, history.bias, history.slots, history.ids, history.depths, history.paths,
        depth, out,
        CHUNK=CHUNK, PAD_D=triton.next_power_of_2(depth), OTHERS=32, **EXACT,
    )
    # fmt: on
    return out


# ---- biases and penalties


@triton.jit
def _penalised(x, prompt, emitted, bias, repetition, presence, frequency):  # type: ignore[no-untyped-def]
    x += bias
    x = tl.where((prompt > 0) | (emitted > 0), tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)), x)
    minus = presence.to(tl.float64) + frequency.to(tl.float64) * emitted.to(tl.float64)
    return tl.where(emitted > 0, x - minus.to(tl.float32), x)


@triton.jit
def _on_path(ids, paths, end, k):  # type: ignore[no-untyped-def]
    """The token at each depth k; -1 beyond the end."""
    row = tl.load(paths + k, mask=k < end, other=0)
    return tl.load(ids + row, mask=k < end, other=-1)


# A step's inputs are views of one tensor. Their alignment in it must not lead to another compilation.
# fmt: off
@triton.jit(do_not_specialize=["repetition", "presence", "frequency", "slots", "ids", "depths", "paths",
                               "by_sequence", "by_row", "n", "depth_limit"])
def _adjust(  # type: ignore[no-untyped-def]
    logits, by_sequence, by_row, n, vocabulary, repetition, presence, frequency,
    prompt, emitted, bias, slots, ids, depths, paths, depth_limit, out,
    CHUNK: tl.constexpr, PAD_D: tl.constexpr, OTHERS: tl.constexpr,
):
    # fmt: on
    """Adjust a chunk for the committed text, then once more those of its tokens that are on the row's path."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    sequence, i = row // n, row % n
    logits += sequence.to(tl.int64) * by_sequence + i.to(tl.int64) * by_row
    out += row.to(tl.int64) * vocabulary
    slot = tl.load(slots + sequence).to(tl.int64) * vocabulary
    prompt += slot
    emitted += slot
    bias += slot
    repeat = tl.load(repetition + sequence)
    present = tl.load(presence + sequence)
    frequent = tl.load(frequency + sequence)

    at = chunk * CHUNK + tl.arange(0, CHUNK)
    there = at < vocabulary
    x = tl.load(logits + at, mask=there, other=0.0).to(tl.float32)
    before = tl.load(prompt + at, mask=there, other=0)
    times = tl.load(emitted + at, mask=there, other=0)
    plus = tl.load(bias + at, mask=there, other=0.0)
    tl.store(out + at, _penalised(x, before, times, plus, repeat, present, frequent), mask=there)
    tl.debug_barrier()  # the stores below must come last

    end = tl.minimum(tl.load(depths + row) + 1, depth_limit)
    paths += row.to(tl.int64) * depth_limit
    token = _on_path(ids, paths, end, tl.arange(0, PAD_D))  # (PAD_D,)
    on_path = tl.zeros((PAD_D,), tl.int32)
    for start in range(0, end, OTHERS):
        other = _on_path(ids, paths, end, start + tl.arange(0, OTHERS))  # (OTHERS,)
        on_path += tl.sum((token[:, None] == other[None, :]).to(tl.int32), 1)
    there = (token >= chunk * CHUNK) & (token < chunk * CHUNK + CHUNK)
    x = tl.load(logits + token, mask=there, other=0.0).to(tl.float32)
    before = tl.load(prompt + token, mask=there, other=0)
    times = tl.load(emitted + token, mask=there, other=0) + on_path
    plus = tl.load(bias + token, mask=there, other=0.0)
    tl.store(out + token, _penalised(x, before, times, plus, repeat, present, frequent), mask=there)


# ---- values of a row


@triton.jit
def _scaled(logits, at, there, temperature):  # type: ignore[no-untyped-def]
    x = tl.load(logits + at, mask=there, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def _top(tops, row, chunks, PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row's largest logit; NaN if it has one."""
    chunk = tl.arange(0, PAD)
    top = tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    bad = tl.max((top != top).to(tl.int32), 0) > 0
    return tl.where(bad, float("nan"), tl.max(tl.where(top == top, top, float("-inf")), 0))


@triton.jit
def _distance(x, top):  # type: ignore[no-untyped-def]
    """Distance from the largest logit. It is not negative, so its bits read as an integer have the same order."""
    return tl.where(x == top, 0.0, top - x)


@triton.jit
def _weight(distance):  # type: ignore[no-untyped-def]
    return (tl.exp(-distance) * ONE).to(tl.int64)


@triton.jit
def _rank(x):  # type: ignore[no-untyped-def]
    """An integer that falls as x grows; the same for 0 and -0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _noisy(x, token, keys, row, temperature):  # type: ignore[no-untyped-def]
    """x plus the noise of `sampling.gumbel`, in float64."""
    noisy = x.to(tl.float64)
    if temperature > 0:
        bits = token.to(tl.uint32) * 0x9E3779B1
        for half in tl.static_range(2):
            bits += tl.load(keys + row * 2 + half).to(tl.uint32)
            bits = (bits ^ (bits >> 16)) * 0x7FEB352D
            bits = (bits ^ (bits >> 15)) * 0x846CA68B
            bits = bits ^ (bits >> 16)
        u = (bits.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
        noisy -= tl.log(-tl.log(u))
    return noisy


@triton.jit
def _order(distance, token):  # type: ignore[no-untyped-def]
    """An integer with the order in which a nucleus takes tokens: by distance, then by id."""
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << 24) | token


@triton.jit
def _best(noisy, order, among):  # type: ignore[no-untyped-def]
    """The largest noisy value, and the smallest order among the tokens that have it."""
    best = tl.max(tl.where(among, noisy, float("-inf")), 0)
    return best, tl.min(tl.where(among & (noisy == best), order, BEYOND), 0)


@triton.jit
def _filters(temperature, top_k, top_p, sequence, vocabulary):  # type: ignore[no-untyped-def]
    """Temperature, k and p, and whether top k and top p apply."""
    t = tl.load(temperature + sequence)
    k = tl.load(top_k + sequence)
    p = tl.load(top_p + sequence)
    return t, k, p, (t > 0) & (k > 0) & (k < vocabulary), (t > 0) & (p < 1)


@triton.jit
def _share(p, mass):  # type: ignore[no-untyped-def]
    """The nucleus leaves out a token if those before it weigh at least this. The mass is rounded as `Sampler` rounds
    it. Otherwise the tiny weights of all other tokens would keep two equal ones from being half of the mass each."""
    return tl.ceil(p.to(tl.float64) * mass.to(tl.float32).to(tl.float64)).to(tl.int64)


# ---- the launches


# fmt: off
@triton.jit(do_not_specialize=["temperature", "by_sequence", "by_row", "n"])
def _peaks(  # type: ignore[no-untyped-def]
    logits, by_sequence, by_row, n, vocabulary, temperature, tops, peaks, sizes,
    CHUNK: tl.constexpr, PEAK: tl.constexpr,
):
    # fmt: on
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    logits += (row // n).to(tl.int64) * by_sequence + (row % n).to(tl.int64) * by_row
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(logits, at, at < vocabulary, tl.load(temperature + row // n))
    bad = tl.max((x != x).to(tl.int32), 0) > 0
    peak = tl.max(tl.reshape(tl.where(x == x, x, float("-inf")), (CHUNK // PEAK, PEAK)), 1)
    tl.store(peaks + (row * chunks + chunk).to(tl.int64) * (CHUNK // PEAK) + tl.arange(0, CHUNK // PEAK), peak)
    tl.store(tops + row * chunks + chunk, tl.where(bad, float("nan"), tl.max(peak, 0)))
    if chunk == 0:
        tl.store(sizes + row, 0)


@triton.jit
def _kth(values, size, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rank of the k-th largest value, by bisection between the smallest and the largest rank."""
    one = tl.arange(0, BLOCK)
    ranks = _ranks(values, one, size)  # the first block stays in registers, and mostly there is no other
    lows, highs = ranks, tl.where(one < size, ranks, ~NOBODY)
    for start in range(BLOCK, size, BLOCK):
        more = _ranks(values, start + one, size)
        lows = tl.minimum(lows, more)
        highs = tl.maximum(highs, tl.where(start + one < size, more, ~NOBODY))
    first, last = tl.min(lows, 0), tl.max(highs, 0)
    while first < last:
        middle = (first & last) + ((first ^ last) >> 1)  # their mean, rounded down, even if their sum has 33 bits
        counts = (ranks <= middle).to(tl.int32)
        for start in range(BLOCK, size, BLOCK):
            counts += (_ranks(values, start + one, size) <= middle).to(tl.int32)
        enough = tl.sum(counts, 0) >= k
        first, last = tl.where(enough, first, middle + 1), tl.where(enough, middle, last)
    return first


@triton.jit
def _ranks(values, at, size):  # type: ignore[no-untyped-def]
    return tl.where(at < size, _rank(tl.load(values + at, mask=at < size, other=0.0)), NOBODY)


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "n", "many"])
def _floor(n, vocabulary, temperature, top_k, top_p, peaks, many, floors, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    _t, k, _p, by_k, _by_p = _filters(temperature, top_k, top_p, row // n, vocabulary)
    floor = tl.full((), NOBODY, tl.int32)
    if by_k & (k <= many):
        floor = _kth(peaks + row.to(tl.int64) * many, many, k, BLOCK)
    tl.store(floors + row, floor)


# fmt: off
@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p", "keys", "by_sequence", "by_row", "n"])
def _list(  # type: ignore[no-untyped-def]
    logits, by_sequence, by_row, n, vocabulary, temperature, top_k, top_p,
    min_p, tops, masses, bests, winners, sizes, ids, values, noisies, keys, floors,
    CHUNK: tl.constexpr, PAD: tl.constexpr,
):
    # fmt: on
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    sequence = row // n
    top = _top(tops, row, chunks, PAD)
    t, _k, p, by_k, by_p = _filters(temperature, top_k, top_p, sequence, vocabulary)
    logits += sequence.to(tl.int64) * by_sequence + (row % n).to(tl.int64) * by_row
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(logits, at, at < vocabulary, t)
    distance = _distance(x, top)
    able = (at < vocabulary) & (_rank(x) <= tl.load(floors + row))
    if by_p & (by_k == 0):
        # Beyond this distance even V tokens together weigh less than 1 - p. The 1 more is for the rounding of sums.
        able &= distance <= tl.log(vocabulary / (1 - p)) + 1
        tl.store(masses + row * chunks + chunk, tl.sum(tl.where(at < vocabulary, _weight(distance), 0), 0))
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.full((), BEYOND, tl.int64)
    if tl.max(able.to(tl.int32), 0) > 0:
        noisy = _noisy(x, at, keys, row, t)
        likely = able & (tl.exp(-distance) >= tl.where(t > 0, tl.load(min_p + sequence), 0.0))
        best, winner = _best(noisy, _order(distance, at), likely)
        if by_k | by_p:
            place = tl.cumsum(able.to(tl.int32), 0) - 1
            place += tl.atomic_add(sizes + row, tl.max(place, 0) + 1, sem="relaxed")
            begin = row.to(tl.int64) * vocabulary
            tl.store(ids + begin + place, at, mask=able)
            tl.store(values + begin + place, x, mask=able)
            tl.store(noisies + begin + place, noisy, mask=able)
    tl.store(bests + row * chunks + chunk, best)
    tl.store(winners + row * chunks + chunk, winner)


@triton.jit
def _before(ids, values, noisies, size, top, limit, end, least, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the listed tokens up to rank `limit` and before `end` in order: their weight, and one drawn from them."""
    sums = tl.zeros((BLOCK,), tl.int64)
    bests = tl.full((BLOCK,), float("-inf"), tl.float64)
    winners = tl.full((BLOCK,), BEYOND, tl.int64)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(values + at, mask=at < size, other=0.0)
        noisy = tl.load(noisies + at, mask=at < size, other=0.0)
        distance = _distance(x, top)
        order = _order(distance, tl.load(ids + at, mask=at < size, other=0))
        inside = (at < size) & (_rank(x) <= limit) & (order < end)
        sums += tl.where(inside, _weight(distance), 0)
        likely = inside & (tl.exp(-distance) >= least)
        better = likely & ((noisy > bests) | ((noisy == bests) & (order < winners)))
        bests, winners = tl.where(better, noisy, bests), tl.where(better, order, winners)
    _, winner = _best(bests, winners, winners < BEYOND)
    return tl.sum(sums, 0), winner


# fmt: off
@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p", "by_sequence", "by_row", "n", "chunks",
                               "tokens", "value"])
def _pick(  # type: ignore[no-untyped-def]
    logits, by_sequence, by_row, n, vocabulary, temperature, top_k, top_p,
    min_p, tops, masses, bests, winners, sizes, ids, values, noisies, chunks, tokens, value,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0)
    sequence = row // n
    top = _top(tops, row, chunks, PAD)
    _t, k, p, by_k, by_p = _filters(temperature, top_k, top_p, sequence, vocabulary)
    chunk = row * chunks + tl.arange(0, PAD)
    there = tl.arange(0, PAD) < chunks
    best = tl.load(bests + chunk, mask=there, other=0.0)
    _, winner = _best(best, tl.load(winners + chunk, mask=there, other=BEYOND), there)
    if (by_k | by_p) & (top == top):
        begin = row.to(tl.int64) * vocabulary
        ids += begin
        values += begin
        noisies += begin
        size, least = tl.load(sizes + row), tl.load(min_p + sequence)
        limit = tl.full((), NOBODY, tl.int32)
        if by_k:
            limit = _kth(values, size, k, BLOCK)
            mass, winner = _before(ids, values, noisies, size, top, limit, BEYOND, least, BLOCK)
        else:
            mass = tl.sum(tl.load(masses + chunk, mask=there, other=0), 0)
        if by_p:
            enough = _share(p, mass)
            before, another = _before(ids, values, noisies, size, top, limit, winner, least, BLOCK)
            while (before >= enough) & (another < BEYOND):
                winner = another
                before, another = _before(ids, values, noisies, size, top, limit, winner, least, BLOCK)
    token = tl.minimum(winner & 0xFFFFFF, vocabulary - 1).to(tl.int32)
    logits += sequence.to(tl.int64) * by_sequence + (row % n).to(tl.int64) * by_row
    tl.store(tokens + row, token)
    tl.store(value + row, tl.where(top == top, tl.load(logits + token).to(tl.float32), float("nan")))
