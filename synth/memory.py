"""What numpy's temporaries cost."""

from __future__ import annotations

from functools import cache

import numpy as np


@cache  # once for each process
def keep_freed_memory() -> None:
    """Let glibc hold on to what temporaries free, instead of returning it and faulting every page in again.

    Once the largest block that counts (32 MB) was freed, smaller ones come from the heap, of which up to twice as much
    stays (mallopt(3), M_MMAP_THRESHOLD). It is never touched, so it takes no memory; elsewhere it does nothing.
    """
    np.empty((1 << 25) - (1 << 13), np.uint8)
