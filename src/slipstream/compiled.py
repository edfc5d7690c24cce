"""How loops are compiled: with numba, without the GIL, and cached from one process to the next.

A first run waits for compiling, so keep that short. A function is compiled for every combination of argument types, and
a literal has a type of its own: compiled code passes on `np.int64(0)`, not 0. Assigning an array to a slice takes numba
two seconds to compile, since it may fail with a message; a loop takes next to none.
"""

from __future__ import annotations

from numba import njit

compiled = njit(cache=True, nogil=True, no_cfunc_wrapper=True)  # no wrapper for C, which never calls them
inlined = njit(inline="always")  # for functions of one line, or called in one place
