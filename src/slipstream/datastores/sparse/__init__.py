"""Search by exact match: sorted runs of text, and what followed the longest endings of a text in them."""
