"""Sizes that host code and kernels must agree on."""

PAGE = 128  # positions of a text that are contiguous in the cache
BLOCK = 32  # positions that attention scores at once
TILE = 16  # rows × grouped heads of one product in attention: the height of a tensor core's product
WIDE = 64  # the same where a sequence has many rows: keys are read a quarter as often
