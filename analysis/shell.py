"""Shell scripts as data: the commands that a script would start, with their words filled in; nothing is executed.

Parsed by tree-sitter's grammar of bash. Assignments, arrays, here-documents, functions, sourced files, ``for`` over
values and conditions that the text decides are followed; where it does not decide, every branch is. A loop that shifts
arguments is not entered: what it assigns is named as what arguments can change.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from klgrad.analysis.shellwords import Word, expansion_of, line_of, parse, source_of, text_of, variable_of, words_of

if TYPE_CHECKING:
    from tree_sitter import Node

MAX_PATHS = 32
_MAX_DEPTH = 8
_SHELLS = ("bash", "sh", "zsh")


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        words: as the command gets them.
        choices: the values of loops and the branches that lead to it.
        arguments: the variables in it that the script's own arguments can change.
        written: the files that the script has written by then, from here-documents.
    """

    words: tuple[Word, ...]
    choices: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    written: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Script:
    """What a script would start, the words of its arrays and assignments, and sourced files that are not there."""

    commands: tuple[Command, ...]
    loose: tuple[Word, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class _Path:
    """One way through the script so far. ``values``: the words of each variable."""

    values: Mapping[str, tuple[Word, ...]] = field(default_factory=dict)
    functions: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[Command, ...] = ()
    choices: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    loose: tuple[Word, ...] = ()
    missing: tuple[str, ...] = ()
    depth: int = 0

    def having(self, name: str, words: Iterable[Word], *, more: bool = False) -> _Path:
        before = self.values.get(name, ()) if more else ()
        return replace(self, values={**self.values, name: (*before, *words)})


def follow(text: str, beside: Callable[[str], str | None] = lambda name: None) -> Script:
    """What a script would start.

    Args:
        beside: the text of a file that the script sources, by its name; None where there is none.
    """
    ends = _walk(parse(text), _Path(), _Reader(beside))
    commands: dict[Any, Command] = {}
    for command in (command for path in ends for command in path.commands):
        commands.setdefault((command.words, command.written), command)
    loose = dict.fromkeys(word for path in ends for word in path.loose)
    missing = dict.fromkeys(name for path in ends for name in path.missing)
    return Script(tuple(commands.values()), tuple(loose), tuple(missing))


@dataclass(frozen=True)
class _Reader:
    beside: Callable[[str], str | None]


_Step = Callable[["Node", _Path, _Reader], list[_Path]]


def _walk(node: Node, path: _Path, reader: _Reader) -> list[_Path]:
    """All ways through a node, those that came to the same merged."""
    step = _STEPS.get(node.type)
    return _inside(node.named_children, path, reader) if step is None else step(node, path, reader)


def _inside(nodes: Sequence[Node], path: _Path, reader: _Reader) -> list[_Path]:
    paths = [path]
    for node in nodes:
        paths = _merged(end for start in paths for end in _walk(node, start, reader))
    return paths


def _merged(paths: Iterable[_Path]) -> list[_Path]:
    seen: dict[Any, _Path] = {}
    for path in paths:
        key = (tuple(path.values.items()), path.commands, tuple(path.written.items()))
        seen.setdefault(key, path)
    return list(seen.values())[:MAX_PATHS]


# ------------------------------------------------------------------------------------------------------ statements


def _assigned(node: Node, path: _Path, reader: _Reader) -> list[_Path]:
    name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
    if name is None:
        return [path]
    called = re.sub(r"\[.*\]$", "", source_of(name))
    more = any(child.type == "+=" for child in node.children)
    if value is None:
        words = [Word("", line_of(node))]
    elif value.type == "array":
        words = words_of(value, path.values)
        path = replace(path, loose=(*path.loose, *words))
    else:
        text = text_of(value, path.values)
        if more and path.values.get(called):
            text, more = " ".join(word.text for word in path.values[called]) + text, False
        words = [Word(text, line_of(node))]
        path = replace(path, loose=(*path.loose, Word(f"{called}={text}", line_of(node))))
    if value is not None and _changeable(value, path):
        path = replace(path, arguments=tuple(dict.fromkeys([*path.arguments, called])))
    return [path.having(called, words, more=more)]


def _called(node: Node, path: _Path, reader: _Reader) -> list[_Path]:
    words: list[Word] = []
    for child in node.named_children:
        path = _with_defaults(child, path)
        if child.type == "variable_assignment":  # in front of a command: its environment, and often read back
            (path,) = _assigned(child, path, reader)
        elif child.type != "file_redirect":
            words += words_of(child, path.values)
    return _invoked(words, path, reader, _changeable(node, path)) if words else [path]


def _with_defaults(node: Node, path: _Path) -> _Path:
    """After ``${NAME:=default}``, which sets the name."""
    for each in (node, *_descendants(node)):
        if each.type == "expansion" and re.match(r"\$\{\w+:?=", source_of(each)):
            path = path.having(variable_of(each)[0], [Word(expansion_of(each, path.values), line_of(each))])
    return path


def _changeable(node: Node, path: _Path) -> tuple[str, ...]:
    """The variables in a node that the script's arguments can change."""
    names = re.findall(r"\$\{?(\w+)", source_of(node))
    return tuple(dict.fromkeys(n for n in names if n in path.arguments or (n.isdigit() and n not in path.values)))


def _descendants(node: Node) -> Iterable[Node]:
    for child in node.named_children:
        yield child
        yield from _descendants(child)


def _invoked(words: Sequence[Word], path: _Path, reader: _Reader, used: tuple[str, ...] = ()) -> list[_Path]:
    name = words[0].text
    if path.depth >= _MAX_DEPTH:
        return [path]
    deeper = replace(path, depth=path.depth + 1)
    if name in path.functions:
        bound = {str(i): (word,) for i, word in enumerate(words[1:], start=1)} | {"@": tuple(words[1:])}
        inside = _walk(path.functions[name], replace(deeper, values={**path.values, **bound}), reader)
        return [_left(end, path) for end in inside]
    if name in ("source", ".") and len(words) > 1:
        text = reader.beside(words[1].text)
        if text is None:
            return [replace(path, missing=(*path.missing, words[1].text))]
        return [_left(end, path, positional=False) for end in _walk(parse(text), deeper, reader)]
    if name == "eval" or (
        name.rpartition("/")[2] in _SHELLS and len(words) > 2 and re.fullmatch("-[a-z]*c", words[1].text)
    ):
        script = " ".join(w.text for w in words[1:]) if name == "eval" else words[2].text
        ends = _walk(parse(script), replace(deeper, commands=()), reader)
        line = words[0].line
        return [
            replace(
                _left(end, path, positional=False), commands=(*path.commands, *(_at(c, line) for c in end.commands))
            )
            for end in ends
        ]
    command = Command(tuple(words), path.choices, used, tuple(path.written.items()))
    return [replace(path, commands=(*path.commands, command))]


def _at(command: Command, line: int) -> Command:
    return replace(command, words=tuple(Word(word.text, line) for word in command.words))


def _left(end: _Path, before: _Path, *, positional: bool = True) -> _Path:
    """After a call: the caller's own arguments again."""
    if not positional:
        return replace(end, depth=before.depth)
    values = {name: words for name, words in end.values.items() if not re.fullmatch(r"\d+|@", name)}
    values |= {name: words for name, words in before.values.items() if re.fullmatch(r"\d+|@", name)}
    return replace(end, values=values, depth=before.depth)


def _redirected(node: Node, path: _Path, reader: _Reader) -> list[_Path]:
    body = next((child for child in node.named_children if "redirect" not in child.type), None)
    heredoc = next((child for child in node.named_children if child.type == "heredoc_redirect"), None)
    if heredoc is None:
        return [path] if body is None else _walk(body, path, reader)
    target = next((c for c in [*node.named_children, *heredoc.named_children] if c.type == "file_redirect"), None)
    start = next((c for c in heredoc.named_children if c.type == "heredoc_start"), None)
    content = next((c for c in heredoc.named_children if c.type == "heredoc_body"), None)
    quoted = start is not None and re.match(r"[\"'\\]", source_of(start)) is not None
    text = "" if content is None else (source_of(content) if quoted else text_of(content, path.values))
    words = [] if body is None else [w for c in body.named_children for w in words_of(c, path.values)]
    name = words[0].text if words else ""
    if name == "cat" and target is not None:
        names = [text_of(c, path.values) for c in target.named_children]
    elif name == "tee":
        names = [word.text for word in words[1:] if not word.text.startswith("-")]
    elif name == "read" and len(words) > 1:
        return [path.having(words[-1].text, [Word(text, line_of(node))])]
    else:
        return [path] if body is None else _walk(body, path, reader)
    return [replace(path, written={**path.written, **dict.fromkeys(names, text)})]


def _looped(node: Node, path: _Path, reader: _Reader) -> list[_Path]:
    """``for NAME in ...``: the body once for each value, one after the other."""
    variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
    if variable is None or body is None:
        return [path]
    name, paths = source_of(variable), [path]
    values = [w for child in node.children_by_field_name("value") for w in words_of(child, path.values)]
    for value in values or [Word(f"${name}", line_of(node))]:
        told = (*path.choices, f"{name}={value.text}") if len(values) > 1 else path.choices
        starts = [replace(start.having(name, [value]), choices=told) for start in paths]
        paths = _merged(replace(end, choices=path.choices) for start in starts for end in _walk(body, start, reader))
    return paths


def _while(node: Node, path: _Path, reader: _Reader) -> list[_Path]:
    body = node.child_by_field_name("body")
    if body is None:
        return [path]
    if not re.search(r"\bshift\b|\bgetopts\b", source_of(node)):
        return _walk(body, path, reader)
    names = [source_of(child.named_children[0]) for child in _descendants(body) if child.type == "variable_assignment"]
    held = tuple(dict.fromkeys([*path.arguments, *names]))
    return [replace(path, arguments=held)]


def _if(node: Node, path: _Path, reader: _Reader) -> list[_Path]:
    """The branch that the text decides on, else each, and none where there is no ``else``."""
    branches: list[tuple[str, list[Node]]] = [(_condition(node), _branch(node))]
    for child in node.named_children:
        if child.type == "elif_clause":
            branches.append((_condition(child), _branch(child)))
        elif child.type == "else_clause":
            branches.append(("", list(child.named_children)))
    ends: list[_Path] = []
    for condition, body in branches:
        decided = _decided(condition, path) if condition else True
        if decided is False:
            continue
        chosen = path if decided else replace(path, choices=(*path.choices, f"if {condition}"))
        ends += [_after(end, path) for end in _inside(body, chosen, reader)]
        if decided:
            return _merged(ends)
    return _merged([*ends, path])


def _after(end: _Path, before: _Path) -> _Path:
    """After a branch: it stays named where it has set something."""
    return end if end.values != before.values else replace(end, choices=before.choices)


def _condition(node: Node) -> str:
    found = [child for child in node.children if child.is_named][:1]
    return " ".join(source_of(found[0]).split())[:60] if found else ""


def _branch(node: Node) -> list[Node]:
    """What stands after ``then``."""
    at = next((i for i, child in enumerate(node.children) if child.type == "then"), 0)
    return [c for c in node.children[at + 1 :] if c.is_named and c.type not in ("elif_clause", "else_clause")]


def _decided(condition: str, path: _Path) -> bool | None:
    """Whether a test of known values holds; None where the text does not say."""
    known = {name for name in path.values if name not in path.arguments}
    names = re.findall(r"\$\{?(\w+|[@#*])", condition)
    match = re.fullmatch(r"\[\[?\s*(.*?)\s*\]\]?", condition)
    if not match or any(name not in known for name in names):
        return None
    inner = re.sub(r"\$\{?(\w+)[^\s\"'}]*\}?", lambda m: " ".join(w.text for w in path.values[m[1]]), match[1])
    if "$" in inner:
        return None
    if test := re.fullmatch(r"(!\s*)?-([nz])\s*\"?([^\"]*)\"?", inner):
        return ((test[3] == "") == (test[2] == "z")) != bool(test[1])
    if test := re.fullmatch(r"\"?'?([^\"']*?)\"?'?\s*(==?|!=|-eq|-ne)\s*\"?'?([^\"']*?)\"?'?", inner):
        return fnmatch.fnmatchcase(test[1], test[3]) == (test[2] not in ("!=", "-ne"))
    return None


def _case(node: Node, path: _Path, reader: _Reader) -> list[_Path]:
    subject = node.child_by_field_name("value")
    value = "" if subject is None else text_of(subject, path.values)
    name = "" if subject is None else source_of(subject).strip('"${}')
    open_ = "$" in value or name in path.arguments
    ends: list[_Path] = []
    for item in (child for child in node.named_children if child.type == "case_item"):
        patterns = [text_of(each, path.values).strip("\"'") for each in item.children_by_field_name("value")]
        if not open_ and not any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns):
            continue
        chosen = replace(path, choices=(*path.choices, f"{name} is {'|'.join(patterns)}")) if open_ else path
        body = [child for child in item.named_children if child not in item.children_by_field_name("value")]
        ends += [_after(end, path) for end in _inside(body, chosen, reader)]
        if not open_:
            return _merged(ends)
    return _merged([*ends, path]) if ends else [path]


def _defined(node: Node, path: _Path, reader: _Reader) -> list[_Path]:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    return [path if name is None else replace(path, functions={**path.functions, source_of(name): body})]


def _nothing(node: Node, path: _Path, reader: _Reader) -> list[_Path]:
    return [path]


_STEPS: dict[str, _Step] = {
    "variable_assignment": _assigned,
    "command": _called,
    "redirected_statement": _redirected,
    "for_statement": _looped,
    "while_statement": _while,
    "if_statement": _if,
    "case_statement": _case,
    "function_definition": _defined,
    "comment": _nothing,
    "test_command": _nothing,
    "heredoc_redirect": _nothing,
    "file_redirect": _nothing,
}
