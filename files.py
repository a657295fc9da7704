"""Files: written whole or not at all, and Python modules loaded from where a user names them."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` by way of a temporary file beside it: readers see the old file or the new one.

    Raises:
        OSError: when it cannot be written; what was there before is then untouched.
    """
    import tempfile

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A fresh folder to fill, put in the place of ``folder`` once everything in it was written.

    Raises:
        OSError: when it cannot be written (a full disk); what was at ``folder`` before is then untouched.
    """
    import shutil
    import tempfile
    from pathlib import Path

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


def load_module(place: str) -> Any:
    """The module ``FILE.py`` or ``package.module``, with its neighbours importable as for ``python FILE.py``.

    Raises:
        ImportError: when there is no such file; whatever importing it raises.
    """
    import importlib.util
    import sys
    from pathlib import Path

    path = Path(place)
    folder = str(path.resolve().parent if place.endswith(".py") else Path.cwd())
    sys.path.insert(0, folder)
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ImportError(f"there is no file {place}")
        module = importlib.util.module_from_spec(spec)
        known = sys.modules.get(path.stem)
        sys.modules[path.stem] = module  # what looks its own module up, such as a dataclass, finds it
        try:
            spec.loader.exec_module(module)
        finally:  # afterwards the name means what it meant before: another file may bear it too
            if known is None:
                sys.modules.pop(path.stem, None)
            else:
                sys.modules[path.stem] = known
        return module
    finally:
        sys.path.remove(folder)
