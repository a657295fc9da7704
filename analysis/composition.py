"""A text with all it refers to, as the runs it describes: shell commands, here-documents, defaults lists, references.

Hydra's ``defaults:`` list and NeMo-RL's ``defaults:`` parent are read from beside the file, a command's config from
there or from the here-document that wrote it. ``${...}`` is filled in by omegaconf, ``${oc.env:NAME,default}`` by its
default. What is not there is a ``Gap``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from posixpath import normpath
from typing import Any

from klgrad.analysis.settings import (
    Document,
    Gap,
    Setting,
    check_quotations,
    form_of,
    from_words,
    is_empty,
    parsed,
    plain,
)
from klgrad.analysis.shell import MAX_PATHS, Command, follow

Beside = Callable[[str], str | None]

_MAX_DEPTH = 8
_PROGRAM = re.compile(r"(python|pypy)[\d.]*|uv|torchrun|accelerate|deepspeed|accelerate-launch")
_STARTERS = ("swift", "megatron", "trl", "llamafactory-cli", "axolotl", "oumi", "tune", "cosmos-rl", "trinity", "rl")
_NAMING = ("_component_", "_target_", "recipe", "trainer_type", "trainer", "cls", "class_name", "class_path")
_CONFIG_FLAGS = re.compile(r"(--config|--config[-_]file|--cfg|-c|--recipe|@|config)")
_CONFIG_FILE = re.compile(r".+\.(ya?ml|toml|json)")


def nowhere(name: str) -> None:
    """Beside a text on standard input there is no file."""


def documents(text: str, name: str = "-", beside: Beside = nowhere, *, may_be_empty: bool = False) -> list[Document]:
    """The runs that a text describes: one for a config, one for each command of a script that sets anything.

    Args:
        name: the file's, for messages and for its suffix.
        beside: the text of another file that this one refers to, by the name it uses; None where there is none.
        may_be_empty: a text of nothing but comments, or ``{}``, sets nothing and is no error.

    Raises:
        ValueError: for a text that cannot be read as its format, with the line, or one without a setting.
    """
    name = "standard input" if name == "-" else name
    form = form_of(text, name)
    if may_be_empty and is_empty(text):
        return [Document((), (), form)]
    found = list(_runs(text, name, beside)) if form == "command" else [_config(text, name, form, beside)]
    found += [run for held in _scripts(found[0]) for run in _runs(held, name, beside)] if form == "yaml" else []
    found = [_interpolated(each) for run in found for each in _swept(run)]
    if not any(run.settings for run in found):
        raise ValueError(f"{name} holds no settings (read as {form})")
    return found


def read(text: str, name: str = "-", *, may_be_empty: bool = False) -> Document:
    """The first run of a text that refers to nothing beside it; see ``documents``."""
    return documents(text, name, may_be_empty=may_be_empty)[0]


def _scripts(config: Document) -> list[str]:
    """Scripts that a config holds, as those of job schedulers do."""
    texts = [s.value for s in config.settings if isinstance(s.value, str) and re.search(r"\S\s+\S", s.value)]
    return [text for text in texts if any(_launch(command) for command in follow(text).commands)]


def _swept(document: Document) -> Iterator[Document]:
    """Hydra's ``--multirun``: each value of ``key=a,b`` is a run."""
    if not any(setting.key == "multirun" and setting.flag for setting in document.settings):
        yield document
        return
    swept = [s for s in document.settings if isinstance(s.value, str) and re.fullmatch(r"[^\[({,]+(,[^,]+)+", s.value)]
    for values in islice(product(*(str(s.value).split(",") for s in swept)), MAX_PATHS):
        chosen = dict(zip(swept, values, strict=True))
        settings = tuple(replace(s, value=plain(chosen[s])) if s in chosen else s for s in document.settings)
        label = ", ".join([document.label] * bool(document.label) + [f"{s.key}={v}" for s, v in chosen.items()])
        yield replace(document, settings=settings, label=label)


# ----------------------------------------------------------------------------------------------------------- configs


def _config(text: str, name: str, form: str, beside: Beside) -> Document:
    settings, repeated = parsed(text, name, form)
    settings, gaps = _composed(text, name, settings, beside) if form == "yaml" else (settings, [])
    return Document(tuple(settings), tuple(_named(settings)), form, tuple(repeated), tuple(gaps))


def _named(settings: Sequence[Setting]) -> Iterator[str]:
    """Classes, components and recipes that a config names."""
    for setting in settings:
        value = str(setting.value)
        if setting.key.rpartition(".")[2] in _NAMING or re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", value):
            yield value


def _composed(
    text: str, name: str, own: list[Setting], beside: Beside, depth: int = 0
) -> tuple[list[Setting], list[Gap]]:
    """The settings with those of the ``defaults`` that a YAML text names, in the order in which they count."""
    items = _defaults(text)
    if items is None:
        return own, []
    own = [s for s in own if not re.fullmatch(r"defaults(\.\d+.*)?", s.key)]
    if depth > _MAX_DEPTH:
        return own, []
    found: list[Setting] = []
    gaps: list[Gap] = []
    for item, under in items if ("_self_", "") in items else [*items, ("_self_", "")]:
        if item == "_self_":
            found += own
            continue
        inner = _from_file(item, beside, depth)
        if inner is None:
            gaps.append(_missing(item, f"{name} takes its defaults from {item}"))
            continue
        found += [replace(s, key=f"{under}.{s.key}" if under else s.key, line=None) for s in inner[0]]
        gaps += inner[1]
    return found, gaps


def _defaults(text: str) -> list[tuple[str, str]] | None:
    """``(file, section it is put under)`` of a defaults list; None where the text has none."""
    import yaml

    if not re.search(r"(?m)^[\"']?defaults[\"']?\s*:", text):
        return None
    try:
        listed = yaml.safe_load(text).get("defaults")
    except (yaml.YAMLError, AttributeError, RecursionError):
        return None
    if isinstance(listed, str):
        return [(listed, "")]
    if not isinstance(listed, list):
        return None
    items = []
    for each in [str(each).partition("@")[0] if isinstance(each, str) else each for each in listed]:
        group, file = next(iter(each.items())) if isinstance(each, dict) and each else ("", each)
        group = str(group).removeprefix("optional ").removeprefix("/")
        if not isinstance(file, str) or group.startswith(("override ", "hydra")):
            continue
        folder, _, section = group.partition("@")
        inside = section if section not in ("_global_", "_here_") else ""
        items.append((f"{folder}/{file}" if folder else file.removeprefix("/"), inside or folder.replace("/", ".")))
    return items


def _from_file(item: str, beside: Beside, depth: int) -> tuple[list[Setting], list[Gap]] | None:
    file = item if _CONFIG_FILE.fullmatch(item) else f"{item}.yaml"
    text = beside(file)
    if text is None:
        return None
    folder = file.rpartition("/")[0]

    def from_there(name: str) -> str | None:
        return beside(normpath(f"{folder}/{name}")) if folder else beside(name)

    settings, _ = parsed(text, file, form_of(text, file))
    return _composed(text, file, settings, from_there, depth + 1)


def _missing(file: str, what: str) -> Gap:
    return Gap("missing-file", f"{what}, which is not there", decisive=True, file=file)


# ---------------------------------------------------------------------------------------------------------- scripts


@dataclass(frozen=True)
class _Launch:
    """A command without what starts its program: the program's name, and the words after it."""

    program: str
    words: tuple[tuple[str, int], ...]


def _launch(command: Command) -> _Launch | None:
    """The last program that a command starts; None where it starts none."""
    words = [(word.text, word.line) for word in command.words]
    texts = [text for text, _ in words]
    starts = [i for i, text in enumerate(texts) if _PROGRAM.fullmatch(text.rpartition("/")[2])]
    for start in reversed(starts):
        for i in range(start + 1, len(texts)):
            if texts[i] in ("-m", "--module") and i + 1 < len(texts):
                return _Launch(texts[i + 1], tuple(words[i + 2 :]))
            if texts[i].endswith(".py") and not texts[i].startswith("-"):
                return _Launch(texts[i], tuple(words[i + 1 :]))
    for i, text in enumerate(texts):
        if text.rpartition("/")[2] in _STARTERS:
            subcommand = [t for t in texts[i + 1 : i + 2] if re.fullmatch(r"[a-z_]+", t)]
            return _Launch(" ".join([text, *subcommand]), tuple(words[i + 1 + len(subcommand) :]))
    return None


def _runs(text: str, name: str, beside: Beside) -> Iterator[Document]:
    """One document for each program that is started with settings; else one of all that the text holds."""
    check_quotations(text, name)
    script = follow(text, beside)
    gaps = [replace(_missing(f, f"{name} sources {f}"), decisive=False, level="note") for f in script.missing]
    seen = []
    launches = [(command, launch) for command in script.commands if (launch := _launch(command)) is not None]
    for command, launch in launches:
        run = _run(command, launch, name, beside)
        if run.settings and run.settings not in seen:
            seen.append(run.settings)
            yield replace(run, gaps=(*gaps, *run.gaps))
    if not seen:
        words = [(w.text, w.line) for w in script.loose] + [(w.text, w.line) for c in script.commands for w in c.words]
        settings = sorted(from_words(words), key=lambda setting: setting.line or 0)
        yield Document(tuple(settings), tuple(launch.program for _, launch in launches), "command", gaps=tuple(gaps))


def _run(command: Command, launch: _Launch, name: str, beside: Beside) -> Document:
    here = dict(command.written)

    def there(file: str) -> str | None:
        return next(
            (t for n, t in here.items() if n == file or n.endswith("/" + file.removeprefix("./"))), beside(file)
        )

    settings: list[Setting] = []
    names, gaps = [launch.program], list[Gap]()
    for file in _configs(launch.words):
        text = there(file)
        if text is None:
            gaps.append(_missing(file, f"{name} starts its run with {file}"))
            continue
        config = _config(text, file, form_of(text, file), there)
        settings += [replace(setting, line=None) for setting in config.settings]
        names, gaps = [*names, *config.names], [*gaps, *config.gaps]
    settings += list(from_words([w for w in launch.words if not _dropped(w[0])]))
    gaps += [
        Gap("unresolved", f"{text} is not set here, and stands where settings stand", line=line)
        for before, (text, line) in zip([("", 0), *launch.words], launch.words, strict=False)
        if re.fullmatch(r"\$\{?[A-Za-z_]\w*(\[[@*]\])?\}?", text) and not re.fullmatch(r"--[^=]+", before[0])
    ]
    if command.arguments:
        names_ = ", ".join(command.arguments)
        gaps.append(Gap("arguments", f"the script's arguments can change {names_}: its own values are read", "note"))
    return Document(
        tuple(settings), tuple(names), "command", gaps=tuple(gaps), label=", ".join(command.choices)
    )  # fmt: skip


def _dropped(word: str) -> bool:
    """The arguments of the script itself, and variables that nothing sets: no settings."""
    return re.fullmatch(r"\$[@*]|\$\{[@*].*\}|\$\{?[A-Za-z_]\w*(\[[@*]\])?\}?", word) is not None


def _configs(words: Sequence[tuple[str, int]]) -> list[str]:
    """The config files that a command names, Hydra's by path and name."""
    flags = {s.key.lstrip("-").replace("_", "-"): s.value for s in from_words(words) if isinstance(s.value, str)}
    found = []
    if name := flags.get("config-name"):
        folder = str(flags.get("config-path", flags.get("config-dir", ""))).rstrip("/")
        file = name if _CONFIG_FILE.fullmatch(name) else f"{name}.yaml"
        found.append(file if folder in ("", ".") else f"{folder}/{file}")
    texts = [text for text, _ in words]
    for i, text in enumerate(texts):
        key, equals, value = text.partition("=")
        if equals and _CONFIG_FLAGS.fullmatch(key) and _CONFIG_FILE.fullmatch(value):
            found.append(value)
        elif _CONFIG_FILE.fullmatch(text) and "=" not in text and not text.startswith("-"):
            before = texts[i - 1] if i else ""
            if _CONFIG_FLAGS.fullmatch(before) or not before.startswith("-"):
                found.append(text.removeprefix("@"))
    return list(dict.fromkeys(found))


# ------------------------------------------------------------------------------------------------------- references


def _interpolated(document: Document) -> Document:
    """With ``${...}`` filled in where the settings themselves say what it is, or its own default does."""
    if not any(isinstance(s.value, str) and "${" in s.value for s in document.settings):
        return document
    settings, gaps = [], []
    for setting in document.settings:
        value, variables = _environment(setting.value)
        settings.append(replace(setting, value=value))
        gaps += [
            Gap("environment", f"{setting.key}: the environment's {name} counts before {default}, which is read here",
                "note", line=setting.line, key=setting.key)
            for name, default in variables.items()
        ]  # fmt: skip
    return replace(document, settings=tuple(_resolved(settings)), gaps=(*document.gaps, *gaps))


def _environment(value: Any) -> tuple[Any, dict[str, str]]:
    """``${oc.env:NAME,default}`` and a shell's ``${NAME:-default}`` by their defaults, and what these are."""
    variables: dict[str, str] = {}
    if not isinstance(value, str):
        return value, variables

    def default(match: re.Match[str]) -> str:
        name, found = match[1] or match[3], match[2] if match[1] else match[4]
        variables[name.strip()] = found.strip(" '\"")
        return variables[name.strip()]

    pattern = r"\$\{oc\.env:([^,{}]+),([^{}]*)\}|\$\{(\w+):-([^{}]*)\}"
    while (filled := re.sub(pattern, default, value)) != value:
        value = filled
    return plain(value), variables


def _resolved(settings: Sequence[Setting]) -> Iterator[Setting]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree = OmegaConf.create(_nested(settings))
    for setting in settings:
        if isinstance(setting.value, str) and "${" in setting.value and "oc.env" not in setting.value:
            try:
                value = OmegaConf.select(tree, setting.key)
            except (OmegaConfBaseException, RecursionError):
                value = None
            if isinstance(value, (str, int, float)):
                setting = replace(setting, value=plain(value))
        yield setting


def _nested(settings: Sequence[Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for setting in settings:
        *above, last = setting.key.split(".")
        at = tree
        for part in above:
            inner = at.get(part)
            if not isinstance(inner, dict):
                inner = at[part] = {}
            at = inner
        at[last] = setting.value
    return tree
