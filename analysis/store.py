"""Finished blocks of long work, an .npz file each, so that what was interrupted goes on from them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.files import write_whole

if TYPE_CHECKING:
    from pathlib import Path


def save_block(path: Path, **arrays: Any) -> None:
    """Write a block, its folder made if need be; a reader finds it whole or not at all."""
    import io

    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_whole(path, buffer.getvalue())


def load_block(path: Path, *names: str) -> list[np.ndarray] | None:
    """The named arrays of a finished block; None where there is none or it is damaged, whatever numpy makes of that."""
    with suppress(Exception), path.open("rb") as file:
        stored = np.load(file)
        return [stored[name] for name in names]
    return None
