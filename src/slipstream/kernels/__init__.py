"""Kernels of fixed-shape steps on a GPU. Their result for a row depends on that row alone."""
