"""Imported first by every side of a comparison: Python's cyclic collector then stays out of it.

By default it looks at each object of numpy and torch many times while they are imported and again at the end, and finds
nothing: a tenth or two of a process that takes 0.2 s.
"""

from __future__ import annotations

import atexit
import gc

gc.disable()
atexit.register(gc.freeze)
