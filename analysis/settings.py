"""Settings as people write them: YAML, JSON, TOML, Hydra overrides and command lines, with line numbers.

Files are data: nothing in them is executed or constructed. Keys come out dotted, values as bool, number, text or
``None``; ``$NAME`` stays in a value where nothing in the text sets it. What a shell script starts is in ``shell``,
what stands in other files in ``composition``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

FORMATS = ("yaml", "json", "toml", "command")
MAX_SETTINGS = 20_000
_SUFFIXES = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".sh": "command", ".bash": "command"}
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_SHELL_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")


@dataclass(frozen=True)
class Setting:
    """One setting: dotted key, value, the line it stands on where known, and whether it is a bare ``--flag``."""

    key: str
    value: Any
    line: int | None = None
    flag: bool = False


@dataclass(frozen=True)
class Repeat:
    """A key that one mapping holds twice: dotted key, the line of the first one and that of the one that counts."""

    key: str
    first: int
    line: int


@dataclass(frozen=True)
class Gap:
    """What a text leaves open: a sentence, its level, whether settings that decide may stand there; line, file, key."""

    id: str
    message: str
    level: str = "warning"
    decisive: bool = False
    line: int | None = None
    file: str = ""
    key: str = ""


@dataclass(frozen=True)
class Document:
    """What a text sets for one run.

    Args:
        settings: in order; a later setting of a key counts.
        names: programs called, classes and components: what a library is known by apart from its keys.
        format: one of ``FORMATS``.
        repeated: keys written twice.
        gaps: what is open.
        label: which of several runs of the text it is.
    """

    settings: tuple[Setting, ...]
    names: tuple[str, ...]
    format: str
    repeated: tuple[Repeat, ...] = ()
    gaps: tuple[Gap, ...] = ()
    label: str = ""


def plain(value: Any) -> Any:
    """Text that stands for a bool, a number or nothing becomes that; everything else stays."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("", "none", "null", "~"):
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text) if re.fullmatch(r"[-+.\deE]+", text) else text
    except ValueError:
        return text


_Repeats = dict[tuple[int, int], Repeat]


def form_of(text: str, name: str) -> str:
    """The format of a text: from the name's suffix, else from its looks.

    Raises:
        ValueError: for Python, and for what is no text.
    """
    suffix = re.search(r"\.\w+$", name)
    if suffix and suffix[0].lower() == ".py":
        raise ValueError(f"{name} is Python and is not executed: write its settings as key=value lines, or as YAML")
    if "\0" in text:
        raise ValueError(f"{name} is no text file")
    return (_SUFFIXES.get(suffix[0].lower()) if suffix else None) or _guess(text)


def is_empty(text: str) -> bool:
    """Whether a text is nothing but comments, or ``{}``."""
    return re.sub(r"(?m)^\s*#.*$|\s", "", text) in ("", "{}", "---")


def parsed(text: str, name: str, form: str) -> tuple[list[Setting], list[Repeat]]:
    """The settings of a YAML, JSON or TOML text as they are written, and the keys written twice.

    Raises:
        ValueError: for a text that cannot be read as that format, with the line.
    """
    repeats: _Repeats = {}
    readers: dict[str, Callable[[str, str], Iterator[Setting]]] = {
        "yaml": partial(_yaml, repeats=repeats),
        "json": _json,
        "toml": _toml,
    }
    return list(readers[form](text, name)), list(repeats.values())


def _guess(text: str) -> str:
    import tomllib

    if text.lstrip().startswith("{"):
        return "json"
    try:
        if tomllib.loads(text):
            return "toml"
    except tomllib.TOMLDecodeError:
        pass
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if lines and re.match(r"(- )?[\"']?[\w./-]+[\"']?\s*:(\s|$)|---", lines[0]):
        return "yaml"
    return "command"


# -------------------------------------------------------------------------------------------------------- the formats


def _yaml(text: str, name: str, repeats: _Repeats | None = None) -> Iterator[Setting]:
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or "it cannot be parsed"
        raise ValueError(f"{name} is no valid YAML: {where}{reason}") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply to be read") from None
    if root is None:
        return
    if not isinstance(root, (yaml.MappingNode, yaml.SequenceNode)):
        raise ValueError(f"{name} holds a single value, not settings: write key: value")
    for count, setting in enumerate(_walk(root, (), (), name, {} if repeats is None else repeats)):
        if count >= MAX_SETTINGS:
            raise ValueError(f"{name} holds more than {MAX_SETTINGS:,} settings")
        yield setting


def _walk(node: Any, path: tuple[str, ...], above: tuple[int, ...], name: str, repeats: _Repeats) -> Iterator[Setting]:
    import yaml

    line = node.start_mark.line + 1
    if id(node) in above:
        raise ValueError(f"{name}, line {line}: an anchor holds itself")
    above = (*above, id(node))
    if isinstance(node, yaml.ScalarNode):
        item = node.value
        if not path[-1:] or path[-1].isdigit():  # an item of a list: Hydra's overrides are written so
            match = _OVERRIDE.fullmatch(str(item))
            if match:
                yield Setting(match[1], plain(match[2]), line)
            return
        yield Setting(".".join(path), _scalar(node), line)
    elif isinstance(node, yaml.SequenceNode):
        if not node.value and path:
            yield Setting(".".join(path), None, line)
        for i, child in enumerate(node.value):
            yield from _walk(child, (*path, str(i)), above, name, repeats)
    else:
        merged = [value for key, value in node.value if key.tag.endswith(":merge")]
        for value in merged:  # what << brings comes first, so that own keys count
            for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _walk(mapping, path, above, name, repeats)
        own = [
            pair for pair in node.value if not pair[0].tag.endswith(":merge") and isinstance(pair[0], yaml.ScalarNode)
        ]
        last = {key.value: key for key, _ in own}
        for key, value in own:
            at, counts = key.start_mark.line + 1, last[key.value]
            if key is not counts:  # YAML loaders that take it let the later value replace the earlier one whole
                line = counts.start_mark.line + 1
                repeats.setdefault((at, line), Repeat(".".join((*path, key.value)), at, line))
                continue
            yield from _at(at, _walk(value, (*path, key.value), above, name, repeats), value)


def _at(line: int, settings: Iterator[Setting], node: Any) -> Iterator[Setting]:
    """A scalar's setting stands on its key's line, not on that of an anchor it refers to."""
    import yaml

    for setting in settings:
        yield Setting(setting.key, setting.value, line) if isinstance(node, yaml.ScalarNode) else setting


def _scalar(node: Any) -> Any:
    if node.tag.endswith(":bool"):
        return node.value.lower() in ("true", "yes", "on")
    return plain(node.value)


def _json(text: str, name: str) -> Iterator[Setting]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is no valid JSON: line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply to be read") from None
    lines = _json_lines(text, name)
    for key, value in _flat(content, ()):
        yield Setting(key, plain(value), lines.get(key))


def _json_lines(text: str, name: str) -> dict[str, int]:
    """The line of each key: JSON is YAML but for tabs, which are blanks outside of strings."""
    try:
        return {s.key: s.line for s in _yaml(text.replace("\t", " "), name) if s.line is not None}
    except ValueError:
        return {}


def _toml(text: str, name: str) -> Iterator[Setting]:
    import tomllib

    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name} is no valid TOML: {error}") from None
    lines, table = {}, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]+", line):
            table = _bare(header[1]) + "."
        elif key := re.match(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=", line):
            lines[table + _bare(key[1])] = number
    for key_path, value in _flat(content, ()):
        yield Setting(key_path, plain(value), lines.get(key_path))


def _bare(key: str) -> str:
    return re.sub(r"\s*\.\s*", ".", key).replace('"', "").replace("'", "")


def _flat(content: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _flat(value, (*path, str(key)))
    elif isinstance(content, list) and any(isinstance(item, (dict, list)) for item in content):
        for i, item in enumerate(content):
            yield from _flat(item, (*path, str(i)))
    elif path:
        yield ".".join(path), " ".join(map(str, content)) if isinstance(content, list) else content


def from_words(words: Sequence[tuple[str, int]]) -> Iterator[Setting]:
    """``--flag value``, ``--flag=value``, ``--flag``, ``key=value`` with Hydra's ``+``, ``++`` and ``~``."""
    for i, (token, line) in enumerate(words):
        if token.startswith("--") and len(token) > 2:
            key, equals, value = token[2:].partition("=")
            if equals:
                yield Setting(key, plain(value), line)
                continue
            following = words[i + 1][0] if i + 1 < len(words) else "-"
            if _is_value(following) and _takes_value(token):
                yield Setting(key, plain(following), line, flag=True)
            else:
                yield Setting(key, True, line, flag=True)
        elif (match := _OVERRIDE.fullmatch(token)) and not (i and _takes_value(words[i - 1][0])):
            if not _SHELL_VARIABLE.fullmatch(match[1]):
                yield Setting(match[1], None if token.startswith("~") else plain(match[2]), line)
        elif token.startswith("~") and len(token) > 1:
            yield Setting(token[1:], None, line)


def _is_value(token: str) -> bool:
    return not re.match(r"-{1,2}[A-Za-z]", token) and token not in ("-", "\\", ")", "&&", "|", ";")


def _takes_value(token: str) -> bool:
    return token.startswith("--") and "=" not in token and token != "--multirun"


def check_quotations(text: str, name: str) -> None:
    """Raises:
    ValueError: for a quotation that is not closed, with its line.
    """
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        pending, first = (f"{pending}\n{line}", first) if pending else (line, number)
        try:
            shlex.split(re.sub(r"\\\s*$", "", pending), comments=True)
        except ValueError:
            continue  # a quotation goes on
        pending = ""
    if pending.strip():
        raise ValueError(f"{name}, line {first}: a quotation is not closed")
