"""Sizes that hosts and kernels must agree on."""

PAGE = 128  # positions of a text that lie side by side in the cache
BLOCK = 32  # of them that attention scores at once
TILE = 16  # rows × grouped heads of one product of attention: the height of a tensor core
WIDE = 64  # the same where a sequence has many rows: keys are read a quarter as often
