"""The inputs of a step: tables of its rows, copied to the device in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.compiled import compiled
from slipstream.kernels.draw_inputs import Draws
from slipstream.kernels.sizes import PAGE, TILE
from slipstream.targets.base import Slot
from slipstream.tree import TokenTree

REACH = 32  # accepted keys per sequence that a step can move into place; more in a deeper step of one sequence
DEEPEST = 128  # nodes of the longest path, usually
PADDING, TEXT = -2, -1  # "depths" of rows that are no tree nodes: padding, and tokens of text


class Shape(NamedTuple):
    """The shape of a step, which is a list of rows that belong to sequences. All are maxima."""

    sequences: int
    rows: int
    depth: int  # nodes of a path
    ends: int  # rows after which a token is wanted
    tiles: tuple[int, ...] = ()  # numbers of attention's tiles, by query heads per key head; empty for one sequence
    tile: int = TILE  # height of a tile: rows × grouped heads

    @property
    def reach(self) -> int:
        return max(self.depth, REACH) if self.sequences == 1 else REACH


@dataclass(frozen=True)
class Inputs:
    """A step's inputs, as views of one tensor, so that one copy brings them to the device."""

    flat: Any  # numpy on the host, torch on the device, int32
    ids: Any  # (1, n)
    positions: Any  # (1, n) absolute
    depths: Any  # (1, n) see PADDING and TEXT
    columns: Any  # (1, n) the column that each new key is written to
    parents: Any  # (1, n) rows, -1 for none
    slots: Any  # (1, n) each row's sequence, as a row of the arena's table
    lengths: Any  # (1, n) how much text precedes the row's path; for TEXT the row included
    paths: Any  # (1, n, D) the columns of each row's ancestors and its own, by depth
    ancestors: Any  # (n, 1, D) the rows of these, if there are penalties; else (n, 1, 0)
    ends: Any  # (e,) rows after which a token is wanted
    owners: Any  # (s,) the sequences, as rows of the arena's table
    moves: Any  # (s,) how many keys to move: those that the last step accepted
    sources: Any  # (s, R) the columns where these are
    places: Any  # (s, R) the columns that they belong in
    emitted: Any  # (s, R) new tokens of the text before the root, -1 for none: for penalties
    tiles: tuple[Any, ...]  # (·, 2) each: see `exact_attention`
    draws: Draws  # how to draw the token after each end

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


class Chain:
    """A chain's nodes, in arrays that several chains may share: a batch drafts many of them, and trees take longer to
    make."""

    __slots__ = ("depths", "parents", "tokens")

    def __init__(self, tokens: NDArray[np.int32], parents: NDArray[np.int32], depths: NDArray[np.int32]) -> None:
        """(n,) each, as a TokenTree has them."""
        self.tokens, self.parents, self.depths = tokens, parents, depths

    def __len__(self) -> int:
        return len(self.tokens)


def growing_chains(chains: Sequence[Sequence[int]], more: int) -> Iterator[list[Chain]]:
    """Chains of known tokens, then the same with one more token that is not known yet, and so on."""
    longest = max(map(len, chains)) + more
    parents, depths = np.arange(-1, longest - 1, dtype=np.int32), np.arange(longest, dtype=np.int32)
    tokens = [np.array([*chain, *[0] * more], np.int32) for chain in chains]
    for grown in range(more + 1):
        ends = [len(chain) + grown for chain in chains]
        yield [Chain(t[:end], parents[:end], depths[:end]) for t, end in zip(tokens, ends, strict=True)]


NO_NODES = np.empty(0, np.int32)


def fill(
    host: Inputs,
    table: NDArray[np.int32],  # the page table
    groups: Sequence[int],  # query heads per key head, for each of the host's tables of tiles
    slots: Sequence[Slot],
    trees: Sequence[TokenTree | Chain],
    known: Sequence[int],  # nodes of each tree that were computed before
    texts: int = 0,  # how many of the last trees are chains that are read as text
    tile: int = TILE,  # height of attention's tiles
) -> None:
    """Fill in the rows of all trees, padding, and the moves of keys that the step before accepted."""
    h, moved = host, [slot.pending or () for slot in slots]
    nodes: Any = [NO_NODES] * 3
    if len(trees) == 1:
        nodes = trees[0].tokens, trees[0].parents, trees[0].depths
    elif trees:
        of_trees = [t.tokens for t in trees] + [t.parents for t in trees] + [t.depths for t in trees]
        nodes = np.concatenate(of_trees).reshape(3, -1)
    sizes = np.array([len(tree) for tree in trees], np.int32)
    each = zip(slots, moved, known, strict=True)
    of_slots = np.array([(s.row, s.length, len(m), before, s.position) for s, m, before in each], np.int32)
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
    table,  # the page table
    ids, positions, depths, columns, parents, slots, lengths, paths, ancestors,  # by row, to fill in
    owners, moves, sources, places, emitted,  # by sequence, to fill in
    tokens, tree_parents, tree_depths, sizes,  # the trees, one after the other
    of_slots,  # for each sequence: row of the table, length, number of nodes that the step before accepted, number of
    # known nodes, and the position of node 0, which equals the length unless the slot is part of a text (`Part`)
    moved,  # the accepted nodes of all sequences: their keys become neighbours
    first_text,  # the number of the first tree that is read as text
):
    # fmt: on
    """Fill in each tree's rows except known nodes, then padding."""
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
    """Fill in tiles, see `exact_attention`. sizes: rows of each sequence."""
    tile = row = 0
    for rows in sizes:
        for number in range((rows * groups + height - 1) // height):
            tiles[tile, 0], tiles[tile, 1] = row, number
            tile += 1
        row += rows
    tiles[tile:] = -1
