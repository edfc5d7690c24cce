"""What a step reads: its rows, as tables that go up in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.kernels.draw_inputs import Draws
from slipstream.kernels.sizes import PAGE, TILE
from slipstream.targets.base import Slot
from slipstream.tree import TokenTree

REACH = 32  # accepted keys of a sequence that a step can move into place, if it has not more rows than that
DEEPEST = 128  # nodes that a path is likely to have at most
PADDING, TEXT = -2, -1  # depths of rows that are no node: nobody's, and tokens that are text


@dataclass(frozen=True)
class Shape:
    """Of a step: a list of rows, which belong to sequences."""

    sequences: int  # at most
    rows: int
    depth: int  # of the deepest path
    ends: int  # rows after which a token is wanted, at most
    tiles: tuple[int, ...] = ()  # by layers' number of query heads per key head, the attention's; none: one sequence
    tile: int = TILE  # how high one of them is

    @property
    def reach(self) -> int:
        return max(self.depth, REACH) if self.sequences == 1 else REACH


@dataclass(frozen=True)
class Inputs:
    """What a step reads, as views of one tensor, so that it goes up in one copy."""

    flat: Any  # numpy on the host, torch on the device, int32
    ids: Any  # (1, n)
    positions: Any  # (1, n) absolute
    depths: Any  # (1, n) see PADDING and TEXT
    columns: Any  # (1, n) where each new key goes
    parents: Any  # (1, n) rows, -1 for none
    slots: Any  # (1, n) each row's sequence, as a row of the arena's table
    lengths: Any  # (1, n) how much text lies before the row's path; for TEXT with the row itself
    paths: Any  # (1, n, D) the columns of each row's ancestors, by depth
    ancestors: Any  # (n, 1, D) their rows: for penalties; else (n, 1, 0)
    ends: Any  # (e,) rows after which a token is wanted
    owners: Any  # (s,) of the sequences, rows of the arena's table
    moves: Any  # (s,) how many keys the last step accepted
    sources: Any  # (s, R) their columns
    places: Any  # (s, R) and the columns they belong in
    emitted: Any  # (s, R) tokens new in the text before the root, -1 for none: for penalties
    tiles: tuple[Any, ...]  # (·, 2) each: see `exact_attention`
    draws: Draws  # by end

    @classmethod
    def of(cls, flat: Any, shape: Shape, history: bool) -> Inputs:
        views, end = list[Any](), 0
        for size in cls._sizes(shape, history):
            begin, end = end, end + int(np.prod(size))
            views.append(flat[begin:end].reshape(size))
        count = len(views) - len(shape.tiles)
        of: Any = [flat, *views[:count], tuple(views[count:]), Draws.of(flat[end:], shape.ends, 1)]
        return cls(*of)

    @staticmethod
    def _sizes(shape: Shape, history: bool) -> list[tuple[int, ...]]:
        n, s, reach = shape.rows, shape.sequences, shape.reach
        tables = [(1, n, shape.depth), (n, 1, shape.depth if history else 0)]
        return [
            *[(1, n)] * 7,
            *tables,
            *[(shape.ends,), (s,), (s,)],
            *[(s, reach)] * 3,
            *[(count, 2) for count in shape.tiles],
        ]

    @classmethod
    def size(cls, shape: Shape, history: bool) -> int:
        return sum(int(np.prod(s)) for s in cls._sizes(shape, history)) + Draws.size(shape.ends, 1)


NO_NODES = np.empty(0, np.int32)


def fill(
    host: Inputs,
    table: NDArray[np.int32],  # where the pages of each sequence lie
    groups: Sequence[int],  # that the host's tables of tiles are for
    slots: Sequence[Slot],
    trees: Sequence[TokenTree],
    known: Sequence[int],  # nodes of each tree that were computed before
    texts: int = 0,  # how many of the last trees are chains that become text
    tile: int = TILE,  # how high the attention's tiles are
) -> None:
    """The rows of all trees, and padding. What the step before accepted is moved into place by this one."""
    h, moved = host, [slot.pending or [] for slot in slots]
    nodes: Any = [NO_NODES] * 3
    if len(trees) == 1:
        nodes = trees[0].tokens, trees[0].parents, trees[0].depths
    elif trees:
        nodes = [np.concatenate([getattr(t, of) for t in trees]) for of in ("tokens", "parents", "depths")]
    sizes = np.array([len(tree) for tree in trees], np.int32)
    each = zip(slots, moved, known, strict=True)
    of_slots = np.array([[s.row, s.length, len(m), before, s.position] for s, m, before in each], np.int32)
    of_slots = of_slots.reshape(-1, 5)
    paths = np.array([node for path in moved for node in path], np.int32)
    rows = h.ids, h.positions, h.depths, h.columns, h.parents, h.slots, h.lengths, h.paths, h.ancestors
    sequences = h.owners, h.moves, h.sources, h.places, h.emitted
    _put(table, *rows, *sequences, *nodes, sizes, of_slots, paths, len(trees) - texts)
    for count, tiles in zip(groups, h.tiles, strict=False):
        _put_tiles(tiles, sizes - of_slots[:, 3], count, tile)
    for slot in slots:
        slot.pending = None


@compiled
def _column(table, slot, position):  # type: ignore[no-untyped-def]
    return table[slot, position // PAGE] * PAGE + position % PAGE


# fmt: off
@compiled
def _put(  # type: ignore[no-untyped-def]
    table,  # where pages lie
    ids, positions, depths, columns, parents, slots, lengths, paths, ancestors,  # by row, to fill in
    owners, moves, sources, places, emitted,  # by sequence, to fill in
    tokens, tree_parents, tree_depths, sizes,  # the trees, one after the other
    of_slots,  # each sequence's row of the table, its length, how many nodes the step before accepted, and are known,
    # and the position of node 0, which is the length but for part of a text
    moved,  # those that were accepted: their keys stand in a row from here on
    first_text,  # from which sequence on trees are text
):
    # fmt: on
    """The rows of a step: each tree after its sequence's text, but for the nodes that are known; then padding."""
    row = node = move = 0
    for s in range(len(sizes)):
        slot, length, count, known, position = of_slots[s]
        first = row - known  # of node 0
        for j in range(known, sizes[s]):
            depth = tree_depths[node + j]
            ids[0, row], positions[0, row], slots[0, row] = tokens[node + j], position + depth, slot
            columns[0, row] = _column(table, slot, length + j)
            if s >= first_text:
                depths[0, row], lengths[0, row], parents[0, row] = TEXT, length + j + 1, -1
                row += 1
                continue
            parent = tree_parents[node + j]
            depths[0, row], lengths[0, row] = depth, length
            parents[0, row] = first + parent if parent >= known else -1
            up = j
            for k in range(depth, -1, -1):
                paths[0, row, k] = _column(table, slot, length + up)
                if ancestors.shape[2]:
                    ancestors[row, 0, k] = max(first + up, 0)
                up = tree_parents[node + up]
            row += 1
        owners[s], moves[s] = slot, count
        for j in range(count):
            sources[s, j] = _column(table, slot, length - count + moved[move + j])
            places[s, j] = _column(table, slot, length - count + j)
        emitted[s, :] = -1
        node += sizes[s]
        move += count
    for i in range(row, ids.shape[1]):
        ids[0, i], positions[0, i], depths[0, i], columns[0, i] = 0, 0, PADDING, 0
        parents[0, i], slots[0, i], lengths[0, i] = -1, 0, 0
    for s in range(len(sizes), len(owners)):
        owners[s], moves[s] = 0, 0
        emitted[s, :] = -1


@compiled
def _put_tiles(tiles, sizes, groups, height):  # type: ignore[no-untyped-def]
    """See `exact_attention`. sizes: rows of each sequence."""
    tile = row = 0
    for rows in sizes:
        for number in range((rows * groups + height - 1) // height):
            tiles[tile, 0], tiles[tile, 1] = row, number
            tile += 1
        row += rows
    tiles[tile:] = -1
