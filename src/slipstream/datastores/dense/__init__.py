"""Dense retrieval: the positions of a store as vectors of what the target thought there. See docs/dense.md."""
