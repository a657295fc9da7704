"""What each RL library's KL settings do, as data: ``entries/`` holds one file per trainer and per edition of it.

An entry is data. Its ``keys`` have defaults and meanings; each of its ``terms`` is a penalty that is on when its
``when`` holds, with the estimator and options its settings choose; ``findings`` are facts that no formula shows, such
as a coefficient that nothing reads. What a term *is*, an entry never says: that is computed.

In an entry, ``when`` maps keys to conditions: a value, a list of values, ``>0``, ``<1``, ``!value``, ``given``,
``not given`` (operators in a list must all hold); a list of such maps holds when one of them does. A choice is text
with ``{key}`` filled in, ``{of = key, value = text, otherwise = text}``, or a list of choices of which the first counts
whose ``when`` holds (``is`` holds its text).

A file ``NAME@VERSION.toml`` is an edition: what the trainer did ``until`` a date (and ``until_version``). It names its
``base`` and says what differs: keys it adds or changes, those it has to ``drop``, terms and findings of its own; the
base's others hold, but for those that speak of a dropped key. ``stages.toml`` lists trainings that are told apart and
not covered.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from klgrad.analysis.keylists import known_keys
from klgrad.analysis.settings import plain
from klgrad.synth.estimators import unknown

FOLDER = Path(__file__).with_name("entries")
LEVELS = ("open", "error", "warning", "note")


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
        unrelated: settings that sound like the KL and are something else, as patterns.
        issues: threads that bear on the entry.
        mains: programs, classes and recipes that run this trainer, as patterns.
        packages: modules of the library, whose other programs may read its settings otherwise.
        tells: settings that a file must have to be this trainer's, with their values.
        sections: sections that a file may put around the settings.
        own: config files that come with the library: its defaults.
        family: trainers of one library; those that fit a file equally well are told together, in order of ``rank``.
        by_name: whether its settings are another's, so that only its name tells it.
        known: the list of all its settings in ``entries/keys``.
        gone: settings of that list that this version does not have.
        stage: what is trained, in words, where it is none that is covered.
        until, until_version: of an edition, the date and the version from which it no longer holds.
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
    unrelated: tuple[str, ...] = ()
    issues: tuple[str, ...] = ()
    mains: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    tells: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    family: str = ""
    rank: int = 0
    by_name: bool = False
    known: str = ""
    gone: tuple[str, ...] = ()
    stage: str = ""
    until: str = ""
    until_version: str = ""
    asked: str = ""

    def __post_init__(self) -> None:
        mentioned = set(_mentioned([*self.terms, *self.findings, self.policy]))
        if missing := sorted(mentioned - set(self.keys)):
            raise ValueError(f"{self.name} speaks of {', '.join(missing)} and has no such key")
        if wrong := [f["id"] for f in self.findings if f["level"] not in LEVELS]:
            raise ValueError(f"{self.name}: the level of {', '.join(wrong)} is none of {', '.join(LEVELS)}")

    @property
    def trainer(self) -> str:
        """The name without an edition's version."""
        return self.name.partition("@")[0]

    @property
    def how(self) -> str:
        """Whether the library's own function was run or its source read, and the month of what was."""
        month = re.search(r"\d{4}-\d{2}", self.read)
        return ("run" if "executed" in self.read else "read") + (f", {month[0]}" if month else "")

    @cached_property
    def plain_keys(self) -> Mapping[str, str]:
        """The entry's keys by how ``plain_key`` writes them."""
        return {plain_key(key): key for key in self.keys}

    @cached_property
    def all_keys(self) -> frozenset[str]:
        """Every setting that the library is known to have, read here or not, as ``plain_key`` writes it."""
        listed = known_keys(self.known or self.name) or known_keys(self.trainer)
        return frozenset(map(plain_key, [*(listed - set(self.gone)), *self.keys]))


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
def entries() -> Mapping[str, Library]:
    """Everything that a file can be told to be: trainers, their editions, and stages that are not covered, by name."""
    paths = sorted(FOLDER.glob("*.toml"), key=lambda path: ("@" in path.stem, path.stem))
    found = {path.stem: load(path) for path in paths if path.stem != "stages"}
    return found | {stage.name: stage for stage in _stages(FOLDER / "stages.toml")}


@cache
def libraries() -> Mapping[str, Library]:
    """The trainers at their newest version, by name."""
    return {name: entry for name, entry in sorted(entries().items()) if "@" not in name and not entry.stage}


def editions(entry: Library) -> list[Library]:
    """All editions of an entry's trainer, the newest first."""
    found = [each for each in entries().values() if each.trainer == entry.trainer]
    return sorted(found, key=lambda each: each.until or "9999", reverse=True)


def _stages(path: Path) -> list[Library]:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        _made(table.pop("name"), {"read": "its source", "version": "", **table, "keys": {}})
        for table in content["stage"]
    ]


def load(path: Path) -> Library:
    """One entry.

    Raises:
        ValueError: for an entry that is no TOML, lacks a field, or speaks of a key it does not have.
    """
    try:
        content = _content(path)
        return _made(path.stem, content)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is no library entry: {error}") from None


def _content(path: Path) -> dict[str, Any]:
    """A file's tables, on top of those of its base."""
    own = tomllib.loads(path.read_text(encoding="utf-8"))
    if "base" not in own:
        return own
    base = _content(path.with_name(f"{own.pop('base')}.toml"))
    dropped = own.pop("drop", [])
    keys = {key: {**base["keys"].get(key, {}), **table} for key, table in own.pop("keys", {}).items()}
    keys = {key: table for key, table in {**base["keys"], **keys}.items() if key not in dropped}
    for name in ("terms", "findings"):
        base[name] = [part for part in base.get(name, []) if not set(_mentioned(part)) - set(keys)]
    for name in ("unbiased", "closest", "switched_on"):
        if set(base.get(name, {})) - set(keys):
            del base[name]
    inherited = {name: base[name] for name in base if name not in ("until", "until_version", "issues")}
    gone = [*base.get("gone", ()), *dropped]
    return {**inherited, **own, "keys": keys, "gone": [key for key in gone if key not in keys]}


def _made(name: str, content: dict[str, Any]) -> Library:
    keys = {
        key: Key(
            plain(k["default"]),
            k["means"],
            tuple(map(plain, k.get("values", ()))),
            **{name: k[name] for name in ("section", "read") if name in k},
        )
        for key, k in content.pop("keys").items()
    }
    lists: dict[str, Any] = {field: tuple(content.pop(field, ())) for field in _LISTS}
    tells = {key: tuple(values) for key, values in content.pop("tells", {}).items()}
    family = content.pop("family", name.partition("@")[0])
    return Library(name=name, keys=keys, tells=tells, family=family, **lists, **content)


_LISTS = (
    "source", "terms", "findings", "unrelated", "issues", "mains", "packages", "sections", "own", "gone",
)  # fmt: skip


def library(name: str) -> Library:
    """The library of that name; ``name@version`` or ``name@date`` for what it was then.

    Raises:
        ValueError: for an unknown library, saying what there is.
    """
    if name in entries():
        return entries()[name]
    name, _, asked = name.partition("@")
    if name not in entries():
        family = [known for known in libraries() if known.startswith(f"{name}-")]
        if family:
            raise ValueError(f"{name} has several trainers: say which, {' or '.join(family)}")
        raise unknown("library", name, list(libraries()))
    found = entries()[name]
    if asked in ("", found.version):
        return found
    dated = re.fullmatch(r"\d{4}-\d{2}(-\d{2})?", asked)
    asked = f"{asked}-01" if dated and not dated[1] else asked  # a month from its first day
    old = reversed(editions(found)[1:])
    chosen = next((e for e in old if (asked < e.until if dated else _number(asked) < _number(e.until_version))), found)
    same = _number(asked) == _number(chosen.version) and asked[:1].isdigit()
    return chosen if dated or same else replace(chosen, asked=asked)


def _number(version: str) -> tuple[int, ...]:
    """A version for comparison: 0.2.0 is 0.2; what is no version is before all."""
    parts = [int(part) for part in re.findall(r"\d+", re.split(r"[a-z]", version)[0])]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def plain_key(key: str) -> str:
    """A key without the differences that files and command lines make: case, dashes, slashes."""
    return key.lower().replace("-", "_").replace("/", ".")
