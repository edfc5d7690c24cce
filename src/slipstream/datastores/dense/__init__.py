"""Dense retrieval: search a store's positions by the target's hidden states there. See docs/dense.md."""
