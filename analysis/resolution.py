"""A library's settings resolved to recipes: which penalties are on, where, how strong, chosen by which keys.

Evaluates the conditions and choices of an entry (``libraries``) on the settings given and its defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from klgrad.analysis.libraries import Library, plain_key
from klgrad.analysis.recipes import Recipe, parse_recipe
from klgrad.analysis.settings import Setting, plain
from klgrad.synth.estimators import number

ASSUMED_GROUP = 8
_ANYTHINGS = {"n", "name", "type", "path", "estimator", "target", "horizon", "coef", "coeff", "enabled", "ref"}
_GROUPED = ("loo=", "group-mean=", "group-std=")

When = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Given:
    """A setting as it was matched to a key: the key, its value, and where it stands."""

    key: str
    value: Any
    written: str
    line: int | None


@dataclass(frozen=True)
class Penalty:
    """One penalty that is on: where, how strong, its recipe, the keys that chose it, and what else it assumes.

    ``keys`` are all that were asked on the way, ``estimator_keys`` those for the estimator, ``assumption_keys`` those
    for ``provided``.
    """

    placement: str
    coefficient: float
    recipe: Recipe
    coefficient_key: str | None
    estimator_keys: tuple[str, ...]
    keys: tuple[str, ...]
    provided: tuple[str, ...]
    assumption_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resolution:
    """A library's settings in force.

    Args:
        values: every key's value.
        given: the keys that were given.
        penalties: the terms that are on.
        idle: coefficient keys that were given and that no term reads, with the keys that would switch one on.
        unread: settings that are none of the library's, as written.
        problems: ``(id, message, keys)`` of settings that could not be taken as they are.
        policy: how the policy loss is reduced, where an entry says so.
        decisive: the keys that the verdict rests on, given or not.
    """

    library: Library
    values: Mapping[str, Any]
    given: Mapping[str, Given]
    penalties: tuple[Penalty, ...]
    idle: Mapping[str, tuple[str, ...]]
    unread: tuple[Setting, ...]
    problems: tuple[tuple[str, str, tuple[str, ...]], ...]
    policy: str
    decisive: tuple[str, ...] = ()

    @property
    def terms(self) -> list[tuple[float, Recipe]]:
        """Coefficients and recipes, for ``recipes.expected`` and ``readings.reading``."""
        return [(penalty.coefficient, penalty.recipe) for penalty in self.penalties]


def unwrapped(name: str, entry: Library) -> str:
    """A key without the section that a file may put around the entry's settings."""
    section, _, inner = name.partition(".")
    return inner if inner and section in entry.sections else name


def matched(name: str, entry: Library) -> str | None:
    """The one key that a written name means: itself, or one that ends or begins where the other does."""
    text = plain_key(name)
    plain_keys, keys = entry.plain_keys, entry.keys
    if text in plain_keys:
        return plain_keys[text]
    for section in (p for p, key in plain_keys.items() if keys[key].section):
        if text.startswith(f"{section}."):
            return plain_keys[section]
    if text in _ANYTHINGS:
        return None
    ends = [k for p, k in plain_keys.items() if p.endswith(f".{text}") or ("." in p and text.endswith(f".{p}"))]
    return ends[0] if len(ends) == 1 else None


def written(value: Any) -> str:
    """A value as entries and messages write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return number(value) if isinstance(value, (int, float)) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class _Resolver:
    """Evaluates conditions and choices of an entry on the values in force, remembering which keys were asked."""

    def __init__(self, entry: Library, settings: Sequence[Setting]) -> None:
        self.entry = entry
        self.given: dict[str, Given] = {}
        self.unread: list[Setting] = []
        self.problems: list[tuple[str, str, tuple[str, ...]]] = []
        self.asked: list[str] = []
        for setting in settings:
            self._take(self._referred(setting))
        self.values = {key: k.default for key, k in entry.keys.items()} | {k: g.value for k, g in self.given.items()}

    def _take(self, setting: Setting) -> None:
        name = unwrapped(setting.key, self.entry)
        key, value = self._known(name), plain(setting.value)
        for section in self._sections(setting.key):
            if value is not None:
                self.given.setdefault(section, Given(section, "given", setting.key, setting.line))
        name = plain_key(name)
        if key is None and setting.flag and name.startswith("no_"):
            name = name.removeprefix("no_")
            key, value = self._known(name), False
        if key is None:
            self.unread.append(setting)
            return
        known = self.entry.keys[key]
        exact = name == plain_key(key)
        if key in self.given and self.given[key].written == key and name.endswith(f".{plain_key(key)}"):
            return  # the key itself counts before a longer one that ends in it
        if known.section and not exact:
            value = "given" if value is not None else None
        if setting.flag and known.values and set(known.values) == {True, False} and not isinstance(value, bool):
            value = True  # what follows the flag is not its value
        if isinstance(value, str) and "$" in value:
            message = f"{setting.key} = {value} is not resolved here: {written(known.default)} is assumed"
            self._problem(key, message, setting)
            return
        if known.values and (text := written(value)) not in map(written, known.values):
            choices = ", ".join(map(written, known.values))
            self._problem(
                key,
                f"{setting.key} = {text} is no value that {self.entry.title} {self.entry.version} is known to take "
                f"({choices}): its default {written(known.default)} is assumed",
                setting,
            )
            return
        numeric = isinstance(known.default, (int, float)) and not isinstance(known.default, bool) and not known.values
        if numeric and value is not None and not _is_number(value):
            message = f"{setting.key} = {setting.value} is no finite number: {written(known.default)} is assumed"
            self._problem(key, message, setting)
            return
        value = next((v for v in known.values if written(v) == written(value)), value)
        self.given[key] = Given(key, value, key if exact else setting.key, setting.line)

    def _referred(self, setting: Setting) -> Setting:
        """``${key}`` that the text does not set is the library's default of that key."""
        match = re.fullmatch(r"\$\{([\w.]+)\}", setting.value) if isinstance(setting.value, str) else None
        known = self.entry.keys.get(match[1]) if match else None
        return setting if known is None else replace(setting, value=known.default)

    def _known(self, name: str) -> str | None:
        """The key that a name means; none where the library has another setting of just that name."""
        key = matched(name, self.entry)
        if key is None or self.entry.keys[key].section or plain_key(name) == plain_key(key):
            return key
        return None if plain_key(name) in self.entry.all_keys else key

    def _sections(self, name: str) -> list[str]:
        inside = [key for key, known in self.entry.keys.items() if known.section]
        return [key for key in inside if plain_key(name).startswith(f"{plain_key(key)}.")]

    def _problem(self, key: str, message: str, setting: Setting) -> None:
        self.given[key] = Given(key, self.entry.keys[key].default, setting.key, setting.line)
        self.problems.append(("unknown-value", message, (key,)))

    def holds(self, when: When) -> bool:
        """Whether a condition holds; of several, whether one does."""
        if isinstance(when, Mapping):
            found = [self._one(key, condition) for key, condition in when.items()]  # all of them: they are remembered
            return all(found)
        found = [self.holds(each) for each in when]
        return any(found)

    def failing(self, when: When) -> list[str]:
        """The keys whose conditions do not hold."""
        cases = [when] if isinstance(when, Mapping) else when
        return [key for case in cases for key, condition in case.items() if not self._one(key, condition)]

    def _one(self, key: str, condition: Any) -> bool:
        self.asked.append(key)
        value, text = self.values[key], written(self.values[key])
        allowed, fine = [], True
        for each in condition if isinstance(condition, list) else [condition]:
            if isinstance(each, str) and each in ("given", "not given"):
                fine &= (key in self.given) == (each == "given")
            elif isinstance(each, str) and each[:1] == "!":
                fine &= text != each[1:]
            elif isinstance(each, str) and each[:1] in "<>" and each[1:]:
                bound = float(each[1:])
                fine &= _is_number(value) and (value > bound if each[0] == ">" else value < bound)
            else:
                allowed.append(written(each))
        return fine and (not allowed or text in allowed)

    def choose(self, choice: Any) -> str:
        """The text a choice comes to."""
        if isinstance(choice, list):
            chosen = next((each for each in choice if self.holds(each.get("when", {}))), None)
            return "" if chosen is None else self.choose(chosen)
        if isinstance(choice, Mapping) and "of" in choice:
            self.asked.append(choice["of"])
            return self.fill(choice.get(written(self.values[choice["of"]]), choice.get("otherwise", "")))
        return self.fill(choice["is"] if isinstance(choice, Mapping) else choice)

    def fill(self, text: str) -> str:
        """``{key}`` replaced by the key's value; a group size below 2 by an assumed one."""

        def value(match: re.Match[str]) -> str:
            key = match[1]
            self.asked.append(key)
            found = self.values[key]
            if text[: match.start()].endswith(_GROUPED) and not (isinstance(found, int) and found >= 2):
                self._assume_group(key)
                return str(ASSUMED_GROUP)
            return written(found)

        return re.sub(r"\{([\w.]+)\}", value, text)

    def _assume_group(self, key: str) -> None:
        how = f"{key} = {written(self.values[key])}"
        how += " makes no group" if key in self.given else " by default makes no group"
        problem = ("group-size", f"{how}: a group of {ASSUMED_GROUP} is assumed here", (key,))
        if problem not in self.problems:
            self.problems.append(problem)

    def asked_by(self, what: Callable[[], Any]) -> tuple[Any, tuple[str, ...]]:
        """The result of a call, and the keys it asked for."""
        self.asked = []
        result = what()
        return result, tuple(dict.fromkeys(self.asked))


def resolve(entry: Library, settings: Sequence[Setting]) -> Resolution:
    """The penalties that the settings switch on, with the library's defaults for all that is not given."""
    resolver = _Resolver(entry, settings)
    penalties, read = [], set()
    switches: dict[str, tuple[str, ...]] = {}
    decisive: dict[str, None] = {}
    for term in entry.terms:
        resolver.asked = []
        on = resolver.holds(term.get("when", {}))
        asked = tuple(dict.fromkeys(resolver.asked))
        decisive |= dict.fromkeys(asked)
        if on and resolver.values.get(term["coefficient"], 0) is not None:  # a coefficient of none switches it off
            penalties.append(_penalty(resolver, term, asked))
            read.add(term["coefficient"])
            own = [term["coefficient"]] if isinstance(term["coefficient"], str) else []
            decisive |= dict.fromkeys([*penalties[-1].keys, *penalties[-1].assumption_keys, *own])
        elif isinstance(term["coefficient"], str) and term["coefficient"] not in asked:
            failing = resolver.failing(term.get("when", {}))
            switches[term["coefficient"]] = (*switches.get(term["coefficient"], ()), *failing)
    idle = {
        key: tuple(dict.fromkeys(asked))
        for key, asked in switches.items()
        if key in resolver.given and key not in read and resolver.values[key] not in (0, None)
    }
    policy = resolver.choose(entry.policy["aggregation"]) if entry.policy else ""
    return Resolution(
        entry, resolver.values, resolver.given, tuple(penalties), idle, tuple(resolver.unread),
        tuple(resolver.problems), policy, tuple(decisive),
    )  # fmt: skip


def _penalty(resolver: _Resolver, term: Mapping[str, Any], switches: tuple[str, ...]) -> Penalty:
    estimator, estimator_keys = resolver.asked_by(lambda: resolver.choose(term["estimator"]))
    options, option_keys = resolver.asked_by(lambda: [resolver.choose(option) for option in term.get("options", ())])
    name = "+".join([f"{estimator}-in-{term['placement']}", *filter(None, options)])
    try:
        recipe = parse_recipe(name)
    except ValueError as error:
        chosen = ", ".join(f"{key} = {written(resolver.values[key])}" for key in option_keys if key in resolver.given)
        raise ValueError(f"{chosen} cannot be: {error}") from None
    key = term["coefficient"] if isinstance(term["coefficient"], str) else None
    coefficient = resolver.values[key] if key else term["coefficient"]
    provided, assumption_keys = resolver.asked_by(
        lambda: [resolver.fill(p["is"]) for p in term.get("provided", ()) if resolver.holds(p.get("when", {}))]
    )
    return Penalty(
        term["placement"],
        float(coefficient or 0.0),
        recipe,
        key,
        estimator_keys,
        tuple(dict.fromkeys([*switches, *estimator_keys, *option_keys])),
        tuple(provided),
        assumption_keys,
    )


def applicable(resolution: Resolution) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """``(id, level, text, keys)`` of the entry's own findings that the settings bring about."""
    settings = [Setting(g.key, g.value) for g in resolution.given.values()]
    resolver = _Resolver(resolution.library, settings)
    return [
        (finding["id"], finding["level"], resolver.fill(finding["text"]), tuple(finding["keys"]))
        for finding in resolution.library.findings
        if resolver.holds(finding.get("when", {}))
    ]
