"""`draw` in Triton. Every row is cut into chunks of the vocabulary, so that few rows fill a GPU too.

`_adjust` applies biases and penalties, where there are any. `_tops` finds each chunk's largest logit. `_survey` sorts
tokens into bins by their distance from the row's largest, and adds up how many a bin has or what they weigh; so it is
known in which bin the top k, or the nucleus, ends. `_sort_out` draws among the tokens of the bins before, and lists those
of that bin. (With a top k it lists all, since where the nucleus ends is known only when the top k are.) `_pick`, one
program per row, searches the list for the exact end and draws among what is left of it.

Counts and weights are integers. So it doesn't matter in which order they are added up, nor in which order tokens are
listed, and what one launch adds up agrees with another's to the last bit.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.target.draw import Draws, History

# These decide who computes what, not the answer.
CHUNK = 2048  # tokens per program
BINS = 2048  # 16 octaves of distance, from 2⁻⁶ to 2¹⁰
BLOCK = 1024  # listed tokens read at once

NOBODY = tl.constexpr(0x7FFFFFFF)  # larger than any token id
BEYOND = tl.constexpr(1 << 62)  # larger than any key of a search
ONE = tl.constexpr(2.0**39)  # the weight of a row's most probable token


def draw_rows(logits: torch.Tensor, draws: Draws, history: History | None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `draw.draw`. The launches depend on shapes alone: a captured CUDA graph follows the tensors' contents."""
    b, n, vocabulary = logits.shape
    assert vocabulary < 1 << 24, "a row's weight has 64 bits, and a token 24 of a search's key"
    assert draws.keys.shape == (b, n, 2), "one key per row"
    assert draws.keys.is_contiguous(), "keys lie side by side"
    if history is not None:
        logits = _with_history(logits, draws, history)
    assert logits.stride(2) == 1, "a row's logits lie side by side"
    chunks, rows, device = -(-vocabulary // CHUNK), b * n, logits.device
    tops = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    bins = torch.zeros((rows, BINS + 1), dtype=torch.int64, device=device)  # the last: how long the list is
    noisy = torch.empty((rows, chunks), dtype=torch.float64, device=device)
    winners = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    listed = torch.empty((rows, vocabulary), dtype=torch.float32, device=device)
    listed_ids = torch.empty((rows, vocabulary), dtype=torch.int32, device=device)
    tokens = torch.empty((b, n), dtype=torch.int32, device=device)
    value = torch.empty((b, n), dtype=torch.float32, device=device)
    source = (logits, logits.stride(0), logits.stride(1), n, vocabulary)
    filters = (draws.temperature, draws.top_k, draws.top_p)
    found = (draws.min_p, draws.keys, tops, bins, noisy, winners, listed, listed_ids)
    octave = BINS.bit_length() - 5  # bits of a bin's number within its octave
    sizes = {"CHUNK": CHUNK, "PAD": triton.next_power_of_2(chunks), "BINS": BINS, "enable_fp_fusion": False}
    # fmt: off
    _tops[(chunks, rows)](*source, draws.temperature, tops, CHUNK=CHUNK, enable_fp_fusion=False)
    _survey[(chunks, rows)](*source, *filters, tops, bins, SHIFT=23 - octave, **sizes)
    _sort_out[(chunks, rows)](*source, *filters, *found, SHIFT=23 - octave, num_warps=8, **sizes)
    _pick[(rows,)](*source, *filters, *found, tokens, value, BLOCK=BLOCK, num_warps=8, **sizes)
    # fmt: on
    return tokens, value


def _with_history(logits: torch.Tensor, draws: Draws, history: History) -> torch.Tensor:
    """(b, n, V) float32."""
    b, n, vocabulary = logits.shape
    depth = history.paths.shape[2]
    assert logits.stride(2) == 1, "a row's logits lie side by side"
    assert history.prompt.shape == history.said.shape == history.bias.shape, "the state has one shape"
    assert history.prompt.shape[1] == vocabulary, "the state covers the vocabulary"
    assert history.ids.shape == history.depths.shape == (b, n), "one entry per row"
    assert history.paths.shape == (b, n, depth), "one path per row"
    tensors = [history.prompt, history.said, history.bias, history.ids, history.depths, history.paths]
    assert all(t.is_contiguous() for t in tensors), "rows lie side by side"
    out = torch.empty((b, n, vocabulary), dtype=torch.float32, device=logits.device)
    # fmt: off
    _adjust[(-(-vocabulary // CHUNK), b * n)](
        logits, logits.stride(0), logits.stride(1), n, vocabulary,
        draws.repetition, draws.presence, draws.frequency,
        history.prompt, history.said, history.bias, history.rows, history.lengths, history.ids, history.depths,
        history.paths, depth, out,
        CHUNK=CHUNK, PAD_D=triton.next_power_of_2(depth), OTHERS=32, enable_fp_fusion=False,
    )
    # fmt: on
    return out


# ---- biases and penalties


@triton.jit
def _penalised(x, prompt, said, bias, repetition, presence, frequency):  # type: ignore[no-untyped-def]
    x += bias
    x = tl.where((prompt > 0) | (said > 0), tl.where(x < 0, x * repetition, tl.div_rn(x, repetition)), x)
    minus = presence.to(tl.float64) + frequency.to(tl.float64) * said.to(tl.float64)
    return tl.where(said > 0, x - minus.to(tl.float32), x)


@triton.jit
def _on_path(ids, paths, length, end, k):  # type: ignore[no-untyped-def]
    """The token at each depth k; -1 beyond the end."""
    row = tl.load(paths + k, mask=k < end, other=0) - length
    return tl.load(ids + row, mask=k < end, other=-1)


# Where a step's numbers lie in the one tensor that goes up with it must not lead to other machine code.
# fmt: off
@triton.jit(do_not_specialize=["repetition", "presence", "frequency", "rows", "lengths", "ids", "depths", "paths",
                               "by_sequence", "by_row", "n", "depth_limit"])
def _adjust(  # type: ignore[no-untyped-def]
    logits, by_sequence, by_row, n, vocabulary, repetition, presence, frequency,
    prompt, said, bias, rows, lengths, ids, depths, paths, depth_limit, out,
    CHUNK: tl.constexpr, PAD_D: tl.constexpr, OTHERS: tl.constexpr,
):
    # fmt: on
    """A chunk by the committed text, and once more those of its tokens that are on the row's path."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    sequence, i = row // n, row % n
    logits += sequence.to(tl.int64) * by_sequence + i.to(tl.int64) * by_row
    out += row.to(tl.int64) * vocabulary
    slot = tl.load(rows + sequence).to(tl.int64) * vocabulary
    prompt += slot
    said += slot
    bias += slot
    repeat = tl.load(repetition + sequence)
    present = tl.load(presence + sequence)
    frequent = tl.load(frequency + sequence)

    at = chunk * CHUNK + tl.arange(0, CHUNK)
    there = at < vocabulary
    x = tl.load(logits + at, mask=there, other=0.0).to(tl.float32)
    before = tl.load(prompt + at, mask=there, other=0)
    times = tl.load(said + at, mask=there, other=0)
    plus = tl.load(bias + at, mask=there, other=0.0)
    tl.store(out + at, _penalised(x, before, times, plus, repeat, present, frequent), mask=there)
    tl.debug_barrier()  # what is stored below is stored last

    length, depth = tl.load(lengths + sequence), tl.load(depths + row)
    end = tl.minimum(depth + 1, depth_limit)
    paths += row.to(tl.int64) * depth_limit
    ids += sequence * n
    token = _on_path(ids, paths, length, end, tl.arange(0, PAD_D))  # (PAD_D,)
    on_path = tl.zeros((PAD_D,), tl.int32)
    for start in range(0, end, OTHERS):
        other = _on_path(ids, paths, length, end, start + tl.arange(0, OTHERS))  # (OTHERS,)
        on_path += tl.sum((token[:, None] == other[None, :]).to(tl.int32), 1)
    there = (token >= chunk * CHUNK) & (token < chunk * CHUNK + CHUNK)
    x = tl.load(logits + token, mask=there, other=0.0).to(tl.float32)
    before = tl.load(prompt + token, mask=there, other=0)
    times = tl.load(said + token, mask=there, other=0) + on_path
    plus = tl.load(bias + token, mask=there, other=0.0)
    tl.store(out + token, _penalised(x, before, times, plus, repeat, present, frequent), mask=there)


# ---- a row's numbers


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
    """From the largest logit, 0 or more: its bits, taken as an integer, have the same order."""
    return tl.where(x == top, 0.0, top - x)


@triton.jit
def _weight(distance):  # type: ignore[no-untyped-def]
    return (tl.exp(-distance) * ONE).to(tl.int64)


@triton.jit
def _bin(distance, BINS: tl.constexpr, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    bits = distance.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum((bits - 0x3C800000) >> SHIFT, 0), BINS - 1)  # 0x3C800000: 2⁻⁶


@triton.jit
def _rank(x):  # type: ignore[no-untyped-def]
    """An integer that is the smaller, the larger x is; both zeros have the same."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _noisy(x, token, keys, row, temperature):  # type: ignore[no-untyped-def]
    """With the noise of `sampling.gumbel`, in float64."""
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
def _best(noisy, token, among):  # type: ignore[no-untyped-def]
    """The largest and its token, the smaller one of equals."""
    best = tl.max(tl.where(among, noisy, float("-inf")), 0)
    return best, tl.min(tl.where(among & (noisy == best), token, NOBODY), 0)


@triton.jit
def _filters(temperature, top_k, top_p, sequence, vocabulary, top):  # type: ignore[no-untyped-def]
    """temperature, k and p, and whether k and p leave anything out."""
    t = tl.load(temperature + sequence)
    k = tl.load(top_k + sequence)
    p = tl.load(top_p + sequence)
    able = (t > 0) & (top == top)
    return t, k, p, able & (k > 0) & (k < vocabulary), able & (p < 1)


@triton.jit
def _share(p, mass):  # type: ignore[no-untyped-def]
    """A token goes when those before it weigh this. The mass is rounded as `Sampler` rounds it, or two tokens of equal
    weight would not be half of it each because of what all others weigh together."""
    return tl.ceil(p.to(tl.float64) * mass.to(tl.float32).to(tl.float64)).to(tl.int64)


# ---- the launches, chunk by chunk


@triton.jit(do_not_specialize=["temperature", "by_sequence", "by_row", "n"])
def _tops(logits, by_sequence, by_row, n, vocabulary, temperature, tops, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    logits += (row // n).to(tl.int64) * by_sequence + (row % n).to(tl.int64) * by_row
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(logits, at, at < vocabulary, tl.load(temperature + row // n))
    bad = tl.max((x != x).to(tl.int32), 0) > 0
    top = tl.max(tl.where(x == x, x, float("-inf")), 0)
    tl.store(tops + row * chunks + chunk, tl.where(bad, float("nan"), top))


# fmt: off
@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "by_sequence", "by_row", "n"])
def _survey(  # type: ignore[no-untyped-def]
    logits, by_sequence, by_row, n, vocabulary, temperature, top_k, top_p, tops, bins,
    CHUNK: tl.constexpr, PAD: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):
    # fmt: on
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    sequence = row // n
    top = _top(tops, row, chunks, PAD)
    t, _k, _p, by_k, by_p = _filters(temperature, top_k, top_p, sequence, vocabulary, top)
    if (by_k | by_p) == 0:
        return
    logits += sequence.to(tl.int64) * by_sequence + (row % n).to(tl.int64) * by_row
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    distance = _distance(_scaled(logits, at, at < vocabulary, t), top)
    each = tl.where(by_k, 1, _weight(distance))
    place = row.to(tl.int64) * (BINS + 1) + _bin(distance, BINS, SHIFT)
    tl.atomic_add(bins + place, each, mask=(at < vocabulary) & (each > 0), sem="relaxed")


@triton.jit
def _end(bins, row, k, p, by_k, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin in which the top k or the nucleus ends, what lies before it, and what all bins hold."""
    number = tl.arange(0, BINS)
    within = tl.cumsum(tl.load(bins + row.to(tl.int64) * (BINS + 1) + number), 0)
    total = tl.max(within, 0)
    last = tl.min(tl.where(within >= tl.where(by_k, k.to(tl.int64), _share(p, total)), number, BINS - 1), 0)
    return last, tl.max(tl.where(number < last, within, 0), 0), total


# fmt: off
@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p", "keys", "by_sequence", "by_row", "n"])
def _sort_out(  # type: ignore[no-untyped-def]
    logits, by_sequence, by_row, n, vocabulary, temperature, top_k, top_p,
    min_p, keys, tops, bins, noisy, winners, listed, listed_ids,
    CHUNK: tl.constexpr, PAD: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):
    # fmt: on
    chunk, row, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    sequence = row // n
    top = _top(tops, row, chunks, PAD)
    t, k, p, by_k, by_p = _filters(temperature, top_k, top_p, sequence, vocabulary, top)
    logits += sequence.to(tl.int64) * by_sequence + (row % n).to(tl.int64) * by_row
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _scaled(logits, at, at < vocabulary, t)
    distance = _distance(x, top)
    sure = at < vocabulary
    if by_k | by_p:
        last, _before, _total = _end(bins, row, k, p, by_k, BINS)
        number = _bin(distance, BINS, SHIFT)
        first = tl.where(by_k, 0, last)
        unsure = sure & (number >= first) & (number <= last)
        sure &= number < first
        place = tl.cumsum(unsure.to(tl.int32), 0)
        many = tl.max(place, 0)
        if many > 0:
            size = bins + row.to(tl.int64) * (BINS + 1) + BINS
            place += tl.atomic_add(size, many.to(tl.int64), sem="relaxed").to(tl.int32) - 1
            tl.store(listed + row.to(tl.int64) * vocabulary + place, x, mask=unsure)
            tl.store(listed_ids + row.to(tl.int64) * vocabulary + place, at, mask=unsure)
    if t > 0:
        sure &= tl.exp(-distance) >= tl.load(min_p + sequence)
    best = tl.full((), float("-inf"), tl.float64)
    winner = tl.full((), NOBODY, tl.int32)
    if tl.max(sure.to(tl.int32), 0) > 0:
        best, winner = _best(_noisy(x, at, keys, row, t), at, sure)
    tl.store(noisy + row * chunks + chunk, best)
    tl.store(winners + row * chunks + chunk, winner)


# ---- the list, row by row


@triton.jit
def _order(distance, token):  # type: ignore[no-untyped-def]
    """An integer that is the smaller, the earlier a nucleus takes the token."""
    return (distance.to(tl.int32, bitcast=True).to(tl.int64) << 24) | token


@triton.jit
def _keyed(listed, listed_ids, at, size, top, limit, BY_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """By rank, and one each; or by distance and token, and what they weigh, without those whose rank is beyond the
    limit."""
    x = tl.load(listed + at, mask=at < size, other=float("-inf"))
    key = _rank(x).to(tl.int64)
    weight = ((at < size) & (key <= limit)).to(tl.int64)
    if not BY_K:
        distance = _distance(x, top)
        key = _order(distance, tl.load(listed_ids + at, mask=at < size, other=0))
        weight *= _weight(distance)
    return key, weight


@triton.jit
def _search(listed, listed_ids, size, top, limit, target, BY_K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The smallest key that reaches `target`, together with all smaller ones. Most lists are one block."""
    one = tl.arange(0, BLOCK)
    key, weight = _keyed(listed, listed_ids, one, size, top, limit, BY_K)
    lows, highs = tl.where(weight > 0, key, BEYOND), tl.where(weight > 0, key, -BEYOND)
    for start in range(BLOCK, size, BLOCK):
        other, mass = _keyed(listed, listed_ids, start + one, size, top, limit, BY_K)
        lows = tl.minimum(lows, tl.where(mass > 0, other, BEYOND))
        highs = tl.maximum(highs, tl.where(mass > 0, other, -BEYOND))
    first, last = tl.min(lows, 0), tl.max(highs, 0)
    while first < last:
        middle = first + (last - first) // 2
        sums = tl.where(key <= middle, weight, 0)
        for start in range(BLOCK, size, BLOCK):
            other, mass = _keyed(listed, listed_ids, start + one, size, top, limit, BY_K)
            sums += tl.where(other <= middle, mass, 0)
        enough = tl.sum(sums, 0) >= target
        first, last = tl.where(enough, first, middle + 1), tl.where(enough, middle, last)
    return first


# fmt: off
@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p", "keys", "by_sequence", "by_row", "n",
                               "tokens", "value"])
def _pick(  # type: ignore[no-untyped-def]
    logits, by_sequence, by_row, n, vocabulary, temperature, top_k, top_p,
    min_p, keys, tops, bins, noisy, winners, listed, listed_ids, tokens, value,
    CHUNK: tl.constexpr, PAD: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    row, chunks = tl.program_id(0), (vocabulary + CHUNK - 1) // CHUNK
    sequence = row // n
    top = _top(tops, row, chunks, PAD)
    t, k, p, by_k, by_p = _filters(temperature, top_k, top_p, sequence, vocabulary, top)
    chunk = row * chunks + tl.arange(0, PAD)
    there = tl.arange(0, PAD) < chunks
    sure = tl.load(noisy + chunk, mask=there, other=float("-inf"))
    best, winner = _best(sure, tl.load(winners + chunk, mask=there, other=NOBODY), there)
    if by_k | by_p:
        listed += row.to(tl.int64) * vocabulary
        listed_ids += row.to(tl.int64) * vocabulary
        size = tl.load(bins + row.to(tl.int64) * (BINS + 1) + BINS).to(tl.int32)
        limit = tl.full((), BEYOND, tl.int64)  # the last rank of the top k
        edge = tl.full((), BEYOND, tl.int64)  # the last distance and token of the nucleus
        target = tl.zeros((), tl.int64)
        if by_k:
            limit = _search(listed, listed_ids, size, top, limit, k.to(tl.int64), True, BLOCK)
            sums = tl.zeros((BLOCK,), tl.int64)
            for start in range(0, size, BLOCK):
                _key, mass = _keyed(listed, listed_ids, start + tl.arange(0, BLOCK), size, top, limit, False)
                sums += mass
            target = _share(p, tl.sum(sums, 0))
        else:
            _last, before, total = _end(bins, row, k, p, by_k, BINS)
            target = _share(p, total) - before
        if by_p:
            edge = _search(listed, listed_ids, size, top, limit, target, False, BLOCK)
        least = tl.load(min_p + sequence)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(listed + at, mask=at < size, other=float("-inf"))
            token = tl.load(listed_ids + at, mask=at < size, other=0)
            distance = _distance(x, top)
            kept = (at < size) & (_rank(x) <= limit) & (_order(distance, token) <= edge) & (tl.exp(-distance) >= least)
            found, who = _best(_noisy(x, token, keys, row, t), token, kept)
            winner = tl.where(found > best, who, tl.where(found == best, tl.minimum(who, winner), winner))
            best = tl.maximum(best, found)
    winner = tl.where(winner < vocabulary, winner, 0)
    logits += sequence.to(tl.int64) * by_sequence + (row % n).to(tl.int64) * by_row
    tl.store(tokens + row, winner)
    tl.store(value + row, tl.where(top == top, tl.load(logits + winner).to(tl.float32), float("nan")))
