"""Whose settings a text holds, by evidence: every setting that a library knows, and the names in the text.

A setting counts once for each entry that knows it, so that what several libraries share decides between none of them.
What both know cancels in the difference of two totals; a lead of less than a setting known by its whole name is none.
Then trainers and editions of one library are told together, and anything else is refused.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass

from klgrad.analysis.libraries import Library, entries, libraries, plain_key
from klgrad.analysis.resolution import matched, unwrapped, written
from klgrad.analysis.settings import Document, plain

_MAIN, _PACKAGE, _TOLD, _KNOWN, _ENDING = 5.0, 3.0, 3.0, 1.0, 0.4
_ANYBODYS = ("train", "train_async", "main", "run", "rl", "grpo", "dpo", "sft", "kto", "gkd", "rloo")  # as file names
_LEAD = _KNOWN - _ENDING  # a setting by its whole name, where the other has only its last part
_MANY, _MOST = 3, 0.6  # settings that a library must know, and of all, if nothing names it and none is about the KL
_COVERED, _PLENTY = 0.4, 8  # of a text's settings, that a library which nothing names must know; so many are enough


@dataclass(frozen=True)
class Recognition:
    """The entry that a text belongs to, what gave it away, and others that explain the text as well."""

    entry: Library
    clues: tuple[str, ...]
    others: tuple[Library, ...] = ()


def recognise(document: Document) -> Recognition:
    """The entry that explains a text better than all others.

    Raises:
        ValueError: when none does, or several do equally well, with the candidates.
    """
    found = {name: evidence(entry, document) for name, entry in entries().items()}
    found = {name: clues for name, clues in found.items() if clues and _telling(entries()[name], clues, document)}
    if not found:
        raise ValueError(f"no setting names a library: say --library, one of {', '.join(libraries())}")
    best = max(found, key=lambda name: _total(found[name]))
    level = [name for name in found if _total(found[best]) - _total(found[name]) < _LEAD]
    group = [entries()[name] for name in level]
    kin = all(entry.family == entries()[best].family for entry in group)
    if not kin or (len({entry.stage for entry in group}) > 1):
        names = ", ".join(sorted({entry.trainer for entry in group}))
        raise ValueError(f"the settings fit {names} equally well: say --library")
    newest_first = sorted(group, key=lambda entry: entry.until or "9999", reverse=True)
    first, *others = sorted(newest_first, key=lambda entry: entry.rank)
    rare = {clue: sum(clue in clues for clues in found.values()) for clue in found[first.name]}
    clues = sorted((c for c, weight in found[first.name].items() if weight > 0), key=lambda clue: rare[clue])
    return Recognition(first, tuple(clues), tuple(others))


def evidence(entry: Library, document: Document) -> dict[str, float]:
    """What speaks for an entry, with its weight; empty where something speaks against it.

    A setting that it does not know is no evidence against it: people add their own.
    """
    given = {plain_key(unwrapped(s.key, entry)): s.value for s in document.settings}
    flags = {plain_key(unwrapped(s.key, entry)) for s in document.settings if s.flag}
    clues: dict[str, float] = {}
    for key, values in entry.tells.items():
        if key in given and written(plain(given[key])) in map(written, values):
            clues[f"{key} = {written(plain(given[key]))}"] = _TOLD
        elif key in given or "not given" not in values:
            return {}
    for name in document.names:
        if is_main(name, entry):
            clues[name] = _ENDING if name.endswith(".py") and _dotted(name).rpartition(".")[2] in _ANYBODYS else _MAIN
        elif any(_names(name, package) for package in entry.packages):
            clues[name] = _PACKAGE
    clues |= {f"{section}.": _TOLD for section in entry.sections if _has_section(section, document)}
    if not clues and (entry.by_name or (entry.stage and document.format == "command")):
        return {}
    for key, value in given.items():
        known = entry.keys.get(key)
        if known and known.values and "$" not in str(value) and not _takes(value, known.values, key in flags):
            clues[key] = -_KNOWN
        elif key in entry.all_keys:
            clues[key] = _KNOWN
        elif matched(key, entry) is not None:
            clues[key] = _ENDING
    return clues


def is_main(name: str, entry: Library) -> bool:
    """Whether a program, class or recipe is one that runs this trainer."""
    return any(_names(name, main) for main in entry.mains)


def program(document: Document) -> str | None:
    """The program that a command starts."""
    return document.names[0] if document.format == "command" and document.names else None


def _takes(value: object, values: tuple[object, ...], flag: bool) -> bool:
    """Whether a value is one of a setting's; what follows a ``--flag`` that is on or off is no value of it."""
    return (flag and set(values) == {True, False}) or written(plain(value)) in map(written, values)


def _has_section(section: str, document: Document) -> bool:
    return any(plain_key(setting.key).startswith(f"{section}.") for setting in document.settings)


def _names(name: str, pattern: str) -> bool:
    """``a/b/c.py`` is ``a.b.c``; a pattern fits a name that ends in it, part by part."""
    dotted = _dotted(name)
    if pattern in _ANYBODYS and not name.endswith(".py"):
        return dotted == pattern
    return fnmatch.fnmatchcase(dotted, pattern) or fnmatch.fnmatchcase(dotted, f"*.{pattern}")


def _dotted(name: str) -> str:
    return re.sub(r"\.py$", "", name.strip("./")).replace("/", ".")


def _telling(entry: Library, clues: Mapping[str, float], document: Document) -> bool:
    """Whether the evidence is about this trainer, and not settings that every program has."""
    named = any(weight >= _TOLD for weight in clues.values())
    keys = {plain_key(unwrapped(s.key, entry)) for s in document.settings}
    own = any(matched(key, entry) is not None and clues.get(key, 0) >= _KNOWN for key in keys)
    covered = sum(weight > 0 for key, weight in clues.items() if key in keys)
    enough = (own and not entry.stage) or covered >= max(_MANY, _MOST * len(keys))
    return _total(clues) > 0 and (named or (enough and covered >= min(_COVERED * len(keys), _PLENTY)))


def _total(clues: Mapping[str, float]) -> float:
    return sum(clues.values())
