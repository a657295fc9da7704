"""What numpy's temporaries cost."""

from __future__ import annotations

from contextlib import suppress
from functools import cache

_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_KEPT = 1 << 28  # free bytes at the end of the heap that stay
_LARGEST = 1 << 25  # of a block from the heap: glibc allows no more; larger ones are the system's each time


@cache  # once for each process
def keep_freed_memory() -> None:
    """Let glibc hold on to what temporaries free, instead of returning it and faulting every page in again.

    By default it learns to only once large blocks were freed, and in Dask's workers never, which start with a
    MALLOC_TRIM_THRESHOLD_ so low that blocks took four times as long. See mallopt(3). Elsewhere it does nothing.
    """
    with suppress(ImportError, OSError, AttributeError, TypeError):
        import ctypes

        libc = ctypes.CDLL(None)
        libc.mallopt(_TRIM, _KEPT)
        libc.mallopt(_MAP, _LARGEST)
