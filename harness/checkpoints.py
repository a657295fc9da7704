"""Folders written whole or not at all, and the state of a run that goes on from them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A fresh folder to fill, put in the place of ``folder`` once everything in it was written.

    Raises:
        OSError: when it cannot be written (a full disk); what was at ``folder`` before is then untouched.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        yield fresh
        fresh.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old."))
            os.replace(folder, old / folder.name)  # two renames: a crash between them leaves both copies on the disk
            os.replace(fresh, folder)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
