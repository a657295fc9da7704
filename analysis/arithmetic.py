"""Which arithmetic makes the numbers: what decides the last bits of a sum or an exponential besides the versions.

One program gives other last bits on another CPU: numpy and torch choose their loops, OpenBLAS its kernels and libm its
exp by the vector unit that they find. ``NPY_DISABLE_CPU_FEATURES``, ``OPENBLAS_CORETYPE`` and ``ATEN_CPU_CAPABILITY``
choose them by hand, so that two machines can agree.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

_CORE_NAMES = ("scipy_openblas_get_corename64_", "scipy_openblas_get_corename", "openblas_get_corename")


def system() -> str:
    """Operating system and processor."""
    return f"{platform.system()} {platform.machine()}"


def arithmetic(*, torch: bool = False) -> dict[str, str]:
    """What computes here, by name: ``numpy``, ``blas``, ``libm``, and ``torch`` where it computed.

    numpy's is what it dispatches to: found in the CPU and not disabled.
    """
    found = {"numpy": _numpy(), "blas": _blas(), "libm": _libm()}
    return found | ({"torch": _torch()} if torch else {})


def described(identity: Mapping[str, str]) -> str:
    """In words: ``numpy X86_V2 X86_V3, blas scipy-openblas Haswell``."""
    return ", ".join(f"{name} {what}" for name, what in identity.items()) or "nothing"


def apart(then: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, str, str] | None:
    """What kind of difference there is between two, and both sides of it in words; None where they are the same."""
    names = [name for name in dict.fromkeys([*then, *here]) if then.get(name) != here.get(name)]
    if not names:
        return None
    kind = "another math library" if names == ["libm"] else "another CPU's vector unit"
    before, now = (described({name: side[name] for name in names if name in side}) for side in (then, here))
    return kind, before, now


def _numpy() -> str:
    extensions = np.show_config(mode="dicts")["SIMD Extensions"]
    return " ".join([*extensions.get("baseline", ()), *extensions.get("found", ())]) or "no SIMD"


def _umath() -> Any:
    """numpy's own compiled module."""
    return import_module("numpy._core._multiarray_umath")


def _blas() -> str:
    """The library that numpy was built with, and the core whose kernels it runs where it says so."""
    name = str(np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"])
    library = ctypes.CDLL(_umath().__file__)  # loaded already; its dependencies' symbols are found through it
    for symbol in _CORE_NAMES:
        if core := getattr(library, symbol, None):
            core.restype = ctypes.c_char_p
            return f"{name} {core().decode()}"
    return name


def _libm() -> str:
    """The C library, and whether it may fuse multiplications and additions, by which it chooses its exp and log."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION") or platform.libc_ver()[0]
    except (AttributeError, OSError, ValueError):
        name = " ".join(platform.libc_ver()).strip() or f"that of {platform.system()} {platform.release()}"
    return f"{name} with FMA3" if _fuses() else str(name)


def _fuses() -> bool:
    """Whether the CPU fuses: as the kernel says where it does; numpy 2.0 leaves out what it is told to disable."""
    flags = Path("/proc/cpuinfo")
    if flags.is_file():
        return "fma" in flags.read_text().split()
    return bool(getattr(_umath(), "__cpu_features__", {}).get("FMA3"))


def _torch() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())
