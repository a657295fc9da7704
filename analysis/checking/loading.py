"""A function from where its user names it, ``FILE.py:NAME`` or ``package.module:NAME``; one sentence otherwise."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from klgrad.files import load_module


def functions_in(path: str) -> str:
    """The functions a file defines, as ``NAME, or :OTHER``; read and not run, and NAME where it cannot be read."""
    try:
        parsed = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return "NAME"
    named = [each.name for each in parsed.body if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
    return ", or :".join(named) or "NAME"


def mentions_torch(place: str) -> bool:
    """Whether a file's text names torch; its import is long and not the user's, and no module's can be told unread."""
    try:
        return "torch" in Path(place).read_text(errors="ignore")
    except OSError:
        return False


def load(target: str) -> Callable[..., Any]:
    """The function; NAME may be dotted.

    Raises:
        ValueError: when there is no such file, module or function, it is no function that can be called, or importing
            it fails; says which, and what to write instead.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ValueError(f"{target!r} names no function: write FILE.py:NAME or package.module:NAME")
    if Path(place).is_dir():
        raise ValueError(
            f"{place} is a folder: name the file, {Path(place) / 'FILE.py'}:{name}, or package.module:{name}"
        )
    try:
        module = load_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(_not_imported(place, name, error)) from error
    found, owner = module, module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
            raise ValueError(f"{place} has no {name!r}; it has {', '.join(public) or 'no functions'}")
        owner, found = found, getattr(found, part)
    if isinstance(found, type) or (isinstance(owner, type) and _takes_self(owner, name.rpartition(".")[2])):
        kind = found if isinstance(found, type) else owner
        method = "" if isinstance(found, type) else f".{name.rpartition('.')[2]}"
        what = "is a class" if isinstance(found, type) else f"is a method of the class {kind.__name__}"
        raise ValueError(
            f"{target} {what}: give an instance; write checked = {kind.__name__}(...){method} in {place} and check "
            f"{place}:checked"
        )
    if not callable(found):
        raise ValueError(f"{target} is {type(found).__name__}, not a function")
    called: Callable[..., Any] = found
    return called


def _takes_self(owner: type, name: str) -> bool:
    return inspect.isfunction(inspect.getattr_static(owner, name, None))


def _not_imported(place: str, name: str, error: BaseException) -> str:
    if "relative import" in str(error) and place.endswith(".py"):
        package = ".".join((Path(place).resolve().parent.name, Path(place).stem))
        return (
            f"{place} imports relatively, so it is part of a package: write {package}:{name}, with the package's outer "
            "names before it, in the folder that holds the package"
        )
    return f"{place} cannot be imported: {type(error).__name__}: {error}"
