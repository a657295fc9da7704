"""The --out folder of a command: made, in sole use, and saying what an interruption leaves in it."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from klgrad.files import sole_use

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

STORE = ".klgrad-blocks"  # below --out: finished blocks


def present(folder: Path | None) -> frozenset[Path]:
    """What is in the folder before a command writes to it, for ``told``."""
    return frozenset(folder.iterdir()) if folder is not None and folder.is_dir() else frozenset()


def told(files: Iterable[Path], there: frozenset[Path]) -> str:
    """What was written, and which of it took the place of what was there: ``wrote a; replaced b, c``."""
    files = list(files)
    parts = {"wrote": [f for f in files if f not in there], "replaced": [f for f in files if f in there]}
    return "; ".join(f"{word} {', '.join(map(str, named))}" for word, named in parts.items() if named)


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """The folder, made if need be; what was made for a command that then fails is gone again, unless it holds anything.

    Raises:
        ValueError: when it cannot be written to, before any work is done.
    """
    from klgrad.analysis.results import writable_folder

    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        writable_folder(folder)
        yield
    except BaseException:
        with suppress(OSError):  # the first that is not empty ends it
            for path in missing:
                path.rmdir()
        raise


@contextmanager
def held(out: Path | None) -> Iterator[None]:
    """The folder, made if need be and held against every other process; None for a command that writes nothing.

    Whatever ends the command before it has written anything, a refusal above all, leaves no new folder behind.

    Raises:
        ValueError: when it cannot be written to or another process holds it, before any work is done.
    """
    if out is None:
        yield
        return
    with made(out), sole_use(out):
        yield


@contextmanager
def resumable(store: Path | None) -> Iterator[None]:
    """``held`` for the folder of this store; an interruption says what is kept there."""
    with held(None if store is None else store.parent):
        try:
            yield
        except KeyboardInterrupt:
            kept = store is not None and store.exists()
            where = f": finished blocks are kept in {store}; the same command goes on from them" if kept else ""
            raise KeyboardInterrupt(where) from None
