"""Trees as tests compare them: the dynamic tree of EAGLE-2 by its definition, and what a drafted tree says."""

import numpy as np


def dynamic_tree(says, width, depth, nodes):
    """{path: probability given its parent} of the tree that EAGLE-2 keeps. says(path): (V,) what may follow it."""
    found = {}

    def value(path):
        return np.prod([found[path[: i + 1]] for i in range(len(path))])

    frontier = [()]
    for _ in range(depth):
        children = []
        for path in frontier:
            p = says(path)
            best = [(*path, int(token)) for token in np.argsort(-p)[:width] if p[token] > 0]
            found |= {child: p[child[-1]] for child in best}
            children += best
        frontier = sorted(children, key=value, reverse=True)[:width]
    return {path: found[path] for path in sorted(found, key=value, reverse=True)[:nodes]}


def spelled(tree):
    """{path: probability given its parent} of a tree, in which no path may stand twice."""
    paths = [tuple(tree.tokens[tree.path_to(i)][1:].tolist()) for i in range(len(tree))]
    assert len(set(paths)) == len(paths)
    return dict(zip(paths[1:], tree.score[1:].tolist(), strict=True))
