"""Files written whole or not at all, folders in sole use, and Python modules loaded from where a user names them."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LOCK = ".klgrad-lock"
PART = ".part"


def legible(name: str) -> str:
    """A file's name as text, bytes of it that are no UTF-8 as in ``caf\\xe9``; other text as it is."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def write_whole(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``: readers see the old file or the new one, as for ``write_together``."""
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Put every content at its path by way of temporary files beside them, renamed only once all are written.

    Raises:
        OSError: when one cannot be written, in one sentence; all that was there before is then untouched.
    """
    import tempfile

    parts: list[tuple[str, Path]] = []
    path = None
    try:
        for path, content in contents.items():
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
            parts.append((name, path))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(name, 0o644)
        for name, path in parts:
            os.replace(name, path)
    except BaseException as error:
        for name, _ in parts:
            with suppress(OSError):
                os.unlink(name)
        if isinstance(error, OSError):
            raise OSError(
                f"cannot write {path}: {error.strerror or error}; what was there before is untouched"
            ) from error
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


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Hold the folder against every other process that asks for it, and clear what a killed one left half-written.

    The system drops the lock with its process, however that ends, so no lock is ever stale. Where it has no such
    locks (Windows, some network file systems), nothing is held.

    Raises:
        ValueError: when another process holds it, naming that process.
    """
    lock = _hold(folder / LOCK)
    if lock is None:
        yield
        return
    with lock:
        try:
            for part in folder.glob(f".*{PART}"):
                part.unlink(missing_ok=True)
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def _hold(path: Path) -> TextIO | None:
    """The open file with our process's number, locked; None where there are no locks."""
    try:
        import fcntl
    except ImportError:
        return None
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                owner = file.read(20).strip() or "unknown"
            raise ValueError(
                f"{path.parent} is in use by another klgrad (process {owner}): wait for it, or give another folder"
            ) from None
        except OSError:
            file.close()
            return None
        if _same_file(path, file.fileno()):
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            return file
        file.close()  # its last owner removed it between our opening and our locking it


def _same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def load_module(place: str) -> Any:
    """The module ``FILE.py`` or ``package.module``, with its neighbours importable as for ``python FILE.py``.

    Raises:
        ImportError: when there is no such file; whatever importing it raises.
    """
    import importlib.util
    import sys
    from pathlib import Path

    if place.startswith(".") and not place.endswith(".py"):
        raise ImportError(f"{place!r} is no module's name: write FILE.py or package.module")
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
