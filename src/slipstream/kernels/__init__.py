"""What fixed steps compute on a GPU: kernels whose result for a row depends on that row alone."""
