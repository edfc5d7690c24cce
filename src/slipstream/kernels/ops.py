"""Operations of a fixed-shape step that torch.compile must not change: writing keys into the cache, attention along
paths, matrix products, norms, choosing tokens. In Triton on a GPU, in plain torch elsewhere."""

from __future__ import annotations

import torch

from slipstream.kernels.sizes import PAGE, TILE


@torch.library.custom_op("slipstream::write_keys", mutates_args=("keys", "values"))
def write_keys(
    keys: torch.Tensor,  # (pool rows, heads, capacity, d)
    values: torch.Tensor,
    new_keys: torch.Tensor,  # (b, heads, n, d)
    new_values: torch.Tensor,
    rows: torch.Tensor,  # (b,) int32
    columns: torch.Tensor,  # (b, n) int32
) -> None:
    if keys.device.type == "cuda":
        from slipstream.kernels.cache_write import write_cache

        write_cache(keys, values, new_keys, new_values, rows, columns)
        return
    row, column = rows[:, None].long(), columns.long()
    keys[row, :, column] = new_keys.transpose(1, 2)
    values[row, :, column] = new_values.transpose(1, 2)


@write_keys.register_fake
def _write_nothing(*_: object) -> None:
    """For tracing: it returns nothing."""


def turn_keys(
    qkv: torch.Tensor,  # (b, n, (heads + 2 key heads)·d)
    cosines: torch.Tensor,  # (b or 1, n, d), the same in both halves
    sines: torch.Tensor,
    keys: torch.Tensor,  # (pool rows, key heads, capacity, d)
    values: torch.Tensor,
    rows: torch.Tensor,  # (b,) int32
    columns: torch.Tensor,  # (b, n) int32
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values into the cache, return the queries (b, heads, n, d)."""
    if qkv.device.type == "cuda":
        from slipstream.kernels.layer_pieces import turn_by

        return turn_by(qkv, cosines, sines, keys, values, rows, columns)
    kv, d = keys.shape[1], keys.shape[3]
    heads = qkv.unflatten(-1, (-1, d)).transpose(1, 2)  # (b, heads + 2 kv, n, d)
    turning = heads[:, :-kv]
    first, second = turning.chunk(2, -1)
    turned = turning * cosines[:, None] + torch.cat([-second, first], -1) * sines[:, None]
    write_keys(keys, values, turned[:, -kv:], heads[:, -kv:], rows, columns)
    return turned[:, :-kv]


def gate(x: torch.Tensor) -> torch.Tensor:
    """(…, 2I), gate and up projection side by side → (…, I), silu(gate) × up."""
    if x.device.type == "cuda":
        from slipstream.kernels.layer_pieces import gated

        return gated(x)
    one, other = x.chunk(2, -1)
    return torch.nn.functional.silu(one) * other


@torch.library.custom_op("slipstream::move_keys", mutates_args=("keys", "values"))
def move_keys(
    keys: torch.Tensor,  # (layers, pool rows, heads, capacity, d)
    values: torch.Tensor,
    rows: torch.Tensor,  # (b,) int32
    sources: torch.Tensor,  # (b, D) int32, columns
    places: torch.Tensor,  # (b, D) int32 columns, none larger than its source
    counts: torch.Tensor,  # (b,) int32, how many of the D move
) -> None:
    if keys.device.type == "cuda":
        from slipstream.kernels.cache_write import move_cache

        move_cache(keys, values, rows, sources, places, counts)
        return
    for row, source, place, count in zip(rows.tolist(), sources.long(), places.long(), counts.tolist(), strict=True):
        for store in (keys, values):
            store[:, row, :, place[:count]] = store[:, row, :, source[:count]]


@torch.library.custom_op("slipstream::linear", mutates_args=())
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x (…, K), weight (N, K), bias (N,) → (…, N), plus `residual` (…, N). On a GPU in half precision, a row's result
    depends on that row alone."""
    if is_skinny(x, weight):
        from slipstream.kernels.linear import skinny_linear

        return skinny_linear(x, weight, bias, residual)
    out = torch.nn.functional.linear(x, weight, bias)
    return out if residual is None else residual + out


@linear.register_fake
def _product(x: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    """For tracing: the shape alone."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (…, K), weight (2I, K), bias (2I,) → (…, I): `gate` of the product."""
    if is_skinny(x, weight):
        from slipstream.kernels.linear import skinny_linear

        return skinny_linear(x, weight, bias, gated=True)
    return gate(linear(x, weight, bias))


def is_skinny(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there is a kernel that computes each row independently of the others."""
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16) and weight.shape[1] % 16 == 0


@torch.library.custom_op("slipstream::norm", mutates_args=())
def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, centre: bool, shift: bool
) -> torch.Tensor:
    """x (…, H) divided by its root mean square, times weight (H,). centre: subtract the mean first. shift: the factor
    is weight + 1."""
    if x.device.type == "cuda":
        from slipstream.kernels.norm import normalise

        return normalise(x, weight, bias, eps, centre, shift)
    v = x.float()
    if centre:
        v = v - v.mean(-1, keepdim=True)
    v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)
    if not shift and bias is None:
        return weight * v.to(x.dtype)
    v = v * (weight.float() + float(shift))
    return (v if bias is None else v + bias.float()).to(x.dtype)


@norm.register_fake
def _normalised(x: torch.Tensor, *_: object) -> torch.Tensor:
    """For tracing: the shape alone."""
    return x.new_empty(x.shape)


def best(logits: torch.Tensor) -> torch.Tensor:
    """The most probable token after each row of logits (b, n, V), as int32 (2, b, n): its id (the first, in a tie), and
    the bits of its logit in float32. That logit is NaN if any of the row's is."""
    if logits.device.type == "cuda":
        from slipstream.kernels.top import best_of_rows

        return best_of_rows(logits)
    token = logits.argmax(-1)
    return torch.stack([token.int(), logits.gather(-1, token[..., None])[..., 0].float().view(torch.int32)])


def walk(
    ids: torch.Tensor,  # (1, n) int32, the nodes of all trees
    depths: torch.Tensor,  # (1, n) int32, negative for what is no node
    parents: torch.Tensor,  # (1, n) int32
    chosen: torch.Tensor,  # (2, 1, n) int32, as `best` gives it
    roots: torch.Tensor,  # (b,) int64
    room: int,
) -> torch.Tensor:
    """The path that greedy verification accepts below each root, from the tokens chosen after each node:
    (b, 1 + 2·room) int64. Number of nodes on it, at most `room`; the token chosen after each; the nodes. Both lists
    hold the last `room` nodes, and are aligned to the end of their `room` entries."""
    if ids.device.type == "cuda":
        from slipstream.kernels.walk import walk_down

        return walk_down(ids, depths, parents, chosen, roots, room)
    table = torch.zeros((len(roots), 1 + 2 * room), dtype=torch.long)
    for line, root in zip(table, roots.tolist(), strict=True):
        path, depth = [root], 1
        while len(path) == depth:
            token = chosen[0, 0, path[-1]]
            below = (depths[0] == depth) & (parents[0] == path[-1]) & (ids[0] == token)
            path += below.nonzero()[:1, 0].tolist()  # the first, if siblings are equal
            depth += 1
        kept = path[-room:]
        line[0] = len(kept)
        line[1 + room - len(kept) : 1 + room] = chosen[0, 0, kept]
        line[1 + 2 * room - len(kept) :] = torch.tensor(kept)
    return table


@torch.library.custom_op("slipstream::best_tokens", mutates_args=())
def best_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most probable tokens after each row of logits (…, V), best first: log-probabilities (…, k) in float32, and
    ids."""
    if logits.device.type == "cuda":
        from slipstream.kernels.top import top_rows

        return top_rows(logits, k)
    x = logits.float()
    top = x.topk(k)
    return top.values - x.logsumexp(-1, keepdim=True), top.indices


@best_tokens.register_fake
def _best_shapes(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For tracing: the shapes alone."""
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.long)


@torch.library.custom_op("slipstream::attend", mutates_args=("stats", "sums"))
def attend(
    query: torch.Tensor,  # (b, heads, n, d)
    keys: torch.Tensor,  # (pool rows, key heads, capacity, d)
    values: torch.Tensor,
    rows: torch.Tensor,  # (b,) or (b, n)
    lengths: torch.Tensor,  # (b,) or (b, n)
    depths: torch.Tensor,  # (b, n)
    paths: torch.Tensor,  # (b, n, D)
    tables: torch.Tensor | None,  # (·, pages)
    tiles: torch.Tensor | None,  # (·, 2)
    stats: torch.Tensor,  # scratch
    sums: torch.Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tile: int = TILE,
) -> torch.Tensor:
    """(b, n, heads, d): see `exact_attention.exact_attention`."""
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "tables": tables}
    if query.device.type == "cuda":
        from slipstream.kernels.exact_attention import Scratch, exact_attention

        room, cut = Scratch(stats, sums), {"tiles": tiles, "tile": tile}
        return exact_attention(query, keys, values, rows, lengths, depths, paths, room, **cut, **options)  # type: ignore[arg-type]
    return gathered_attention(query, keys, values, rows, lengths, depths, paths, **options)  # type: ignore[arg-type]


@attend.register_fake
def _attended(query: torch.Tensor, _keys: torch.Tensor, values: torch.Tensor, *_: object) -> torch.Tensor:
    """For tracing: the shape alone."""
    b, heads, n = query.shape[:3]
    return query.new_empty(b, n, heads, values.shape[3])


@torch.library.custom_op("slipstream::attend_and_tell", mutates_args=("stats", "sums", "block_weights", "page_shares"))
def attend_and_tell(
    query: torch.Tensor,  # (1, heads, n, d)
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    depths: torch.Tensor,
    paths: torch.Tensor,
    tables: torch.Tensor | None,
    tiles: torch.Tensor | None,
    stats: torch.Tensor,
    sums: torch.Tensor,
    block_weights: torch.Tensor,  # scratch
    page_shares: torch.Tensor,  # (n, heads, pages)
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tile: int = TILE,
) -> torch.Tensor:
    """Like `attend`; also adds to `page_shares` the share of each root's attention weight on each page. A root is a row
    of depth 0."""
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "tables": tables}
    if query.device.type == "cuda":
        from slipstream.kernels.exact_attention import Scratch, exact_attention

        room, cut = Scratch(stats, sums), {"tiles": tiles, "tile": tile}
        weigh = {"block_weights": block_weights, "page_shares": page_shares}
        return exact_attention(query, keys, values, rows, lengths, depths, paths, room, **cut, **weigh, **options)  # type: ignore[arg-type]
    return gathered_attention(query, keys, values, rows, lengths, depths, paths, page_shares=page_shares, **options)  # type: ignore[arg-type]


attend_and_tell.register_fake(_attended)


def gathered_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    depths: torch.Tensor,
    paths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    tables: torch.Tensor | None = None,
    page_shares: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention along paths in plain torch: every row gathers its own keys. Rows of depth -2 are padding."""
    b, heads, n, d = query.shape
    kv, dv = values.shape[1], values.shape[3]
    out = query.new_zeros(b * n, kv, heads // kv, dv)
    here = (depths.reshape(-1) > -2).nonzero()[:, 0]  # (m,) of b·n rows, of which most may be padding
    if len(here) == 0:
        return out.reshape(b, n, heads, dv)
    rows, lengths = ((x[:, None].expand(b, n) if x.dim() == 1 else x).reshape(-1, 1) for x in (rows, lengths))
    rows, lengths, depths = (x[here].long() for x in (rows, lengths, depths.reshape(-1, 1)))
    paths = paths.reshape(b * n, -1)[here].long()
    at = torch.arange(max(1, int((lengths + depths).max()) + 1), device=query.device)[None]  # (1, positions)
    text = at if tables is None else tables[rows[:, 0]].long()[:, at[0] // PAGE] * PAGE + at % PAGE
    drafted = paths.gather(1, (at - lengths).clamp(0, paths.shape[1] - 1))
    column = torch.where(at < lengths, text, drafted)  # (m, positions)
    see = at <= lengths + depths
    if window is not None:
        see &= at > lengths + depths - window
    column, rows = column.where(see, 0), rows if tables is None else torch.zeros_like(rows)
    k, v = (x[rows, :, column].float().transpose(1, 2) for x in (keys, values))  # (m, kv, positions, d)
    q = query.transpose(1, 2).reshape(b * n, kv, heads // kv, d)[here].float()
    scores = q @ k.transpose(2, 3) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = scores.masked_fill(~see[:, None, None], -torch.inf).softmax(-1)
    if page_shares is not None:
        roots = (depths == 0)[:, 0]
        by_page = torch.nn.functional.pad(weights[roots], (0, -weights.shape[3] % PAGE)).unflatten(3, (-1, PAGE)).sum(4)
        page_shares[here[roots], :, : by_page.shape[3]] += by_page.flatten(1, 2)
    v = v.masked_fill(~see[:, None, :, None], 0.0)  # masked columns may hold NaN, and 0 × NaN is NaN
    out[here] = (weights @ v).to(query.dtype)
    return out.reshape(b, n, heads, dv)
