"""What each RL library's KL settings do, as data: ``entries/`` holds one file per library.

An entry is data. Its ``keys`` have defaults and meanings; each of its ``terms`` is a penalty that is on when its
``when`` holds, with the estimator and options its settings choose; ``findings`` are facts that no formula shows, such
as a coefficient that nothing reads. What a term *is*, an entry never says: that is computed.

In an entry, ``when`` maps keys to conditions: a value, a list of values, ``>0``, ``<1``, ``!value``, ``given``,
``not given`` (operators in a list must all hold); a list of such maps holds when one of them does. A choice is text
with ``{key}`` filled in, ``{of = key, value = text, otherwise = text}``, or a list of choices of which the first counts
whose ``when`` holds (``is`` holds its text).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from klgrad.analysis.settings import Setting, plain
from klgrad.synth.estimators import unknown

FOLDER = Path(__file__).with_name("entries")
LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Key:
    """One setting of a library.

    Args:
        default: what holds when it is not given.
        means: in a few words.
        values: all it can be; empty for numbers and free text.
        section: whether any setting below it counts as giving it.
        read: whether the default was read at the entry's version; else it is what is usual there, and lint says so.
    """

    default: Any
    means: str
    values: tuple[Any, ...] = ()
    section: bool = False
    read: bool = True


@dataclass(frozen=True)
class Library:
    """One entry; see the module for the language of ``terms`` and ``findings``.

    Args:
        name: what ``--library`` takes.
        title, version, read, source: which library, at which version, how and where it was read.
        cannot: what no setting gives; empty if nothing.
        keys: its settings by dotted name.
        policy: how the policy loss is reduced, where the KL is not reduced with it.
        unbiased: settings for the sequence-level gradient; empty where there are none.
        closest: settings for the token-level gradient.
        switched_on: the least settings that turn a penalty on, where the defaults have none.
        versions: other versions and what differs in them.
        marks: words of a command line that give the library away.
        unrelated: settings that sound like the KL and are something else, by their last part.
        issues: threads that bear on the entry.
        asked: the version asked for, where it is one that was not read.
    """

    name: str
    title: str
    version: str
    read: str
    source: tuple[str, ...]
    keys: Mapping[str, Key]
    terms: tuple[Mapping[str, Any], ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    policy: Mapping[str, Any] = field(default_factory=dict)
    cannot: str = ""
    unbiased: Mapping[str, Any] = field(default_factory=dict)
    closest: Mapping[str, Any] = field(default_factory=dict)
    switched_on: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    unrelated: tuple[str, ...] = ()
    issues: tuple[str, ...] = ()
    asked: str = ""

    def __post_init__(self) -> None:
        mentioned = set(_mentioned([*self.terms, *self.findings, self.policy]))
        if missing := sorted(mentioned - set(self.keys)):
            raise ValueError(f"{self.name} speaks of {', '.join(missing)} and has no such key")
        if wrong := [f["id"] for f in self.findings if f["level"] not in LEVELS]:
            raise ValueError(f"{self.name}: the level of {', '.join(wrong)} is none of {', '.join(LEVELS)}")


# ------------------------------------------------------------------------------------------------------- the entries


def _mentioned(part: Any) -> Iterator[str]:
    """Every key that conditions, choices and texts of an entry speak of."""
    if isinstance(part, Mapping):
        when = part.get("when", ())
        for condition in [when] if isinstance(when, Mapping) else when:
            yield from condition
        yield from [part[name] for name in ("of", "key") if name in part]
        if isinstance(part.get("coefficient"), str):
            yield part["coefficient"]
        if isinstance(part.get("keys"), list):
            yield from part["keys"]
        for name, value in part.items():
            if name not in ("when", "of", "key", "coefficient", "keys", "id", "level", "placement"):
                yield from _mentioned(value)
    elif isinstance(part, (list, tuple)):
        for value in part:
            yield from _mentioned(value)
    elif isinstance(part, str):
        yield from re.findall(r"\{([\w.]+)\}", part)


@cache
def libraries() -> Mapping[str, Library]:
    """All entries, by name."""
    return {path.stem: load(path) for path in sorted(FOLDER.glob("*.toml"))}


def load(path: Path) -> Library:
    """One entry.

    Raises:
        ValueError: for an entry that is no TOML, lacks a field, or speaks of a key it does not have.
    """
    import tomllib

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        keys = {
            key: Key(
                plain(k["default"]),
                k["means"],
                tuple(map(plain, k.get("values", ()))),
                **{name: k[name] for name in ("section", "read") if name in k},
            )
            for key, k in content.pop("keys").items()
        }
        lists: dict[str, Any] = {
            name: tuple(content.pop(name, ()))
            for name in ("source", "terms", "findings", "marks", "unrelated", "issues")
        }
        return Library(name=path.stem, keys=keys, **lists, **content)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is no library entry: {error}") from None


def library(name: str) -> Library:
    """The library of that name; ``name@version`` for another version that its entry knows.

    Raises:
        ValueError: for an unknown library, saying what there is.
    """
    name, _, version = name.partition("@")
    if name not in libraries():
        family = [known for known in libraries() if known.startswith(f"{name}-")]
        if family:
            raise ValueError(f"{name} has several trainers: say which, {' or '.join(family)}")
        raise unknown("library", name, list(libraries()))
    found = libraries()[name]
    if version in ("", found.version):
        return found
    if version not in found.versions:
        return replace(found, asked=version)
    other = found.versions[version]
    keys = {
        key: replace(k, default=plain(other.get("defaults", {}).get(key, k.default))) for key, k in found.keys.items()
    }
    return replace(found, version=version, read=other["read"], keys=keys)


def plain_key(key: str) -> str:
    """A key without the differences that files and command lines make: case, dashes, slashes."""
    return key.lower().replace("-", "_").replace("/", ".")


def guess(settings: Sequence[Setting], words: Iterable[str] = ()) -> tuple[Library, list[str]]:
    """The library that the settings belong to, and what gave it away.

    Raises:
        ValueError: when none or several fit equally well.
    """
    text = " ".join(words)
    scores: dict[str, list[str]] = {}
    for name, entry in libraries().items():
        written = {plain_key(setting.key) for setting in settings}
        keys = [key for key in entry.keys if plain_key(key) in written]
        marks = [mark for mark in entry.marks if mark in text]
        scores[name] = keys + marks * 3
    best = max(map(len, scores.values()))
    winners = [name for name, clues in scores.items() if len(clues) == best]
    if best == 0:
        raise ValueError(f"no setting names a library: say --library, one of {', '.join(libraries())}")
    if len(winners) > 1:
        raise ValueError(f"the settings fit {', '.join(winners)} equally well: say --library")
    return libraries()[winners[0]], list(dict.fromkeys(scores[winners[0]]))
