"""The most probable token of each row of logits, or the few most probable with their log-probabilities. Two launches:
the first reduces chunks of a row, the second merges their results."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

from slipstream.kernels.overlap import overlap, wait_turn

CHUNK = 2048  # logits that one program of the first launch reads


def top_rows(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.best_tokens`."""
    vocabulary = logits.shape[-1]
    flat = logits.reshape(-1, vocabulary)
    rows, chunks, device = len(flat), -(-vocabulary // CHUNK), logits.device
    tops = torch.empty((rows, chunks, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, chunks, k), dtype=torch.int32, device=device)
    sums = torch.empty((rows, chunks), dtype=torch.float32, device=device)  # of exponentials, relative to the largest
    logp = torch.empty((rows, k), dtype=torch.float32, device=device)
    best = torch.empty((rows, k), dtype=torch.int64, device=device)
    _chunks[(chunks, rows)](
        flat, tops, ids, sums, flat.stride(0), vocabulary, chunks, K=k, CHUNK=CHUNK, num_warps=4, **overlap()
    )
    pad, wide = triton.next_power_of_2(chunks), triton.next_power_of_2(chunks * k)
    _merge[(rows,)](tops, ids, sums, logp, best, chunks, K=k, PAD=pad, WIDE=wide, num_warps=1, **overlap())
    return logp.view(*logits.shape[:-1], k), best.view(*logits.shape[:-1], k)


def best_of_rows(logits: torch.Tensor) -> torch.Tensor:
    """See `ops.best`."""
    b, n, vocabulary = logits.shape
    flat = logits.reshape(-1, vocabulary)
    chunks, device = -(-vocabulary // CHUNK), logits.device
    tops = torch.empty((b * n, chunks), dtype=torch.float32, device=device)
    ids = torch.empty((b * n, chunks), dtype=torch.int32, device=device)
    out = torch.empty((2, b, n), dtype=torch.int32, device=device)
    _peaks[(chunks, b * n)](flat, tops, ids, flat.stride(0), vocabulary, chunks, CHUNK=CHUNK, num_warps=4, **overlap())
    pad = triton.next_power_of_2(chunks)
    _highest[(b * n,)](tops, ids, out, chunks, b * n, PAD=pad, num_warps=1, **overlap())
    return out


@triton.jit
def _take(values, ids):  # type: ignore[no-untyped-def]
    """The largest value, its id (the smallest, in a tie), and the values without it."""
    top = tl.max(values, 0)
    winner = tl.min(tl.where(values == top, ids, 2147483647), 0)
    return top, winner, tl.where(ids == winner, float("-inf"), values)


@triton.jit
def _chunks(  # type: ignore[no-untyped-def]
    logits, tops, ids, sums, row_stride, vocabulary, chunks, K: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr
):
    wait_turn(EARLY)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))  # NaN is never chosen
    top = tl.max(x, 0)
    origin = tl.where(top == float("-inf"), 0.0, top)
    place = row * chunks + chunk
    tl.store(sums + place, tl.sum(tl.exp(x - origin), 0))
    for i in tl.static_range(K):
        value, winner, x = _take(x, token)
        tl.store(tops + place * K + i, value)
        tl.store(ids + place * K + i, winner)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    tops, ids, sums, logp, best, chunks, K: tl.constexpr, PAD: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr
):
    wait_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PAD)
    there = chunk < chunks
    top = tl.load(tops + (row * chunks + chunk) * K, mask=there, other=float("-inf"))
    total = tl.load(sums + row * chunks + chunk, mask=there, other=0.0)
    largest = tl.max(top, 0)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    all_of_it = origin + tl.log(tl.sum(total * tl.exp(tl.where(top == float("-inf"), origin, top) - origin), 0))
    at = tl.arange(0, WIDE)
    values = tl.load(tops + row * chunks * K + at, mask=at < chunks * K, other=float("-inf"))
    names = tl.load(ids + row * chunks * K + at, mask=at < chunks * K, other=2147483647)
    for i in tl.static_range(K):
        value, winner, values = _take(values, names)
        tl.store(logp + row * K + i, value - all_of_it)
        tl.store(best + row * K + i, winner.to(tl.int64))


@triton.jit
def _peaks(logits, tops, ids, row_stride, vocabulary, chunks, CHUNK: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_turn(EARLY)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    top, winner = _first_of_the_largest(x, token)
    tl.store(tops + row * chunks + chunk, top)
    tl.store(ids + row * chunks + chunk, winner)


@triton.jit(do_not_specialize=["rows"])
def _highest(tops, ids, out, chunks, rows, PAD: tl.constexpr, EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_turn(EARLY)
    row = tl.program_id(0)
    chunk = tl.arange(0, PAD)
    x = tl.load(tops + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    names = tl.load(ids + row * chunks + chunk, mask=chunk < chunks, other=2147483647)
    top, winner = _first_of_the_largest(x, names)
    tl.store(out + row, winner)
    tl.store(out + rows + row, top.to(tl.int32, bitcast=True))


@triton.jit
def _first_of_the_largest(x, names):  # type: ignore[no-untyped-def]
    """The largest value and its id (the smallest, in a tie). NaN counts as the largest."""
    bad = x != x
    broken = tl.max(bad.to(tl.int32), 0) > 0
    top = tl.max(tl.where(bad, float("-inf"), x), 0)
    winner = tl.min(tl.where(tl.where(broken, bad, x == top), names, 2147483647), 0)
    return tl.where(broken, float("nan"), top), winner
