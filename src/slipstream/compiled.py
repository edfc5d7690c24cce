"""How loops are compiled: with numba, without the GIL, and kept from one process to the next.

Compiling is what a first run waits for. A function is compiled anew for every kind of argument, and a literal is one of
its own: what compiled code hands on is `np.int64(0)`, not 0. An array that is assigned to a slice takes numba two
seconds, since that may fail with a message; a loop takes none.
"""

from __future__ import annotations

from numba import njit

compiled = njit(cache=True, nogil=True, no_cfunc_wrapper=True)  # nobody calls them from C
inlined = njit(inline="always")  # the small ones that are called in one place, or are a line
