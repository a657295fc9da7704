"""Words of a shell as bash makes them: quotes, expansions, arrays and defaults, without running anything."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tree_sitter import Node


@dataclass(frozen=True)
class Word:
    """A word as a command gets it; ``$NAME`` stays in it where nothing in the text sets NAME."""

    text: str
    line: int


Values = Mapping[str, tuple[Word, ...]]


@cache
def _parser() -> Any:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def parse(text: str) -> Node:
    """The tree of a script."""
    root: Node = _parser().parse(text.encode()).root_node
    return root


def source_of(node: Node) -> str:
    """A node as it is written."""
    return (node.text or b"").decode(errors="replace")


def line_of(node: Node) -> int:
    """The line that a node begins on, from 1."""
    return int(node.start_point[0]) + 1


def words_of(node: Node, values: Values) -> list[Word]:
    """The words that one argument comes to: an array or an unquoted variable may be several, or none."""
    if node.type in ("simple_expansion", "expansion"):
        name, whole = variable_of(node)
        if name in values and re.fullmatch(r"\$\{?(\w+|[@*])(\[[@*]\])?\}?", source_of(node)):
            held = values[name]
            return [Word(part, line_of(node) if not whole else w.line) for w in held for part in _split(w.text, whole)]
        value = expansion_of(node, values)
        return [Word(part, line_of(node)) for part in value.split()]
    if node.type == "command_substitution":
        return [Word(part, line_of(node)) for part in _blanks(text_of(node, values))]
    if node.type == "string" and len(inner := node.named_children) == 1 and "expansion" in inner[0].type:
        name, whole = variable_of(inner[0])
        if whole and name in values:
            return list(values[name])
    if node.type == "array":
        inside = [child for child in node.named_children if child.type != "comment"]
        return [word for child in inside for word in words_of(child, values)]
    if node.type == "concatenation" and any(c.type in ("simple_expansion", "expansion") for c in node.children):
        return [Word(part, line_of(node)) for part in _blanks(text_of(node, values))]
    return [Word(text_of(node, values), line_of(node))]


def _split(text: str, whole: bool) -> list[str]:
    return [text] if whole else _blanks(text)


def _blanks(text: str) -> list[str]:
    """Where a shell splits: at blanks, but for a Hydra override in braces or brackets, which nobody means to split."""
    return text.split() if not re.search(r"[\[{].*\s.*[\]}]", text) else [text]


def text_of(node: Node, values: Values) -> str:
    """The text of a word: quotes taken off, what is known filled in, what is not left as ``$NAME``."""
    if node.type in ("simple_expansion", "expansion"):
        return expansion_of(node, values)
    if node.type == "raw_string":
        return source_of(node)[1:-1]
    if node.type == "ansi_c_string":
        return source_of(node)[2:-1]
    if node.type == "string":
        return _pieces(node, values, escaped='"$`\\\n')
    if node.type in ("concatenation", "heredoc_body", "command_name"):
        return _pieces(node, values)
    if node.type == "command_substitution":
        return _substituted(node, values)
    if node.type == "word":
        return re.sub(r"\\\n|\\(.)", lambda m: m[1] or "", source_of(node))
    return source_of(node)


def _pieces(node: Node, values: Values, escaped: str = "") -> str:
    """Children put together, with the blanks between them that the grammar leaves out."""
    source, start = node.text or b"", node.start_byte
    out, at = [], 0
    for child in node.children:
        first, last = child.start_byte - start, child.end_byte - start
        out.append(source[at:first].decode(errors="replace"))
        if child.type != '"':
            value = text_of(child, values)
            out.append(
                re.sub(rf"\\([{re.escape(escaped)}])", r"\1", value) if child.type == "string_content" else value
            )
        at = last
    out.append(source[at:].decode(errors="replace"))
    return "".join(out)


def variable_of(node: Node) -> tuple[str, bool]:
    """The name that an expansion is of, and whether it stands for a whole array."""
    inner = source_of(node).removeprefix("$").strip("{}")
    match = re.match(r"[!#]?(\w+|[@*])(\[[@*]\])?", inner)
    return (match[1], match[2] is not None or match[1] in "@*") if match else ("", False)


def expansion_of(node: Node, values: Values) -> str:
    """What ``$NAME`` or ``${NAME...}`` comes to, as one text; as it is written where that is not known."""
    name, _ = variable_of(node)
    known = values.get(name)
    operator = re.match(r"\$\{\w+(?:\[[@*0-9]\])?(:?[-=+?]|##?|%%?|//?|,,?|\^\^?)", source_of(node))
    sign = operator[1] if operator else ""
    rest = source_of(node)[operator.end() : -1] if operator else ""
    value = " ".join(word.text for word in known) if known is not None else None
    if sign in (":-", "-", ":=", "="):
        return value if value or (value is not None and ":" not in sign) else _filled(rest, values)
    if sign in (":+", "+"):
        return _filled(rest, values) if value else ""
    if value is None:
        return source_of(node)
    return _cut(value, sign, rest)


def _cut(value: str, sign: str, rest: str) -> str:
    if sign == ",,":
        return value.lower()
    if sign == "^^":
        return value.upper()
    if sign == "##" and rest == "*/":
        return value.rpartition("/")[2]
    if sign in ("/", "//") and "/" in rest:
        old, _, new = rest.partition("/")
        return value.replace(old, new, -1 if sign == "//" else 1)
    return value


def _filled(text: str, values: Values) -> str:
    """A default inside of ``${NAME:-default}``, itself expanded."""
    if "$" not in text:
        return text.strip("\"'")
    inner = parse(f"x {text}").named_children
    arguments = inner[0].named_children[1:] if inner else []
    return " ".join(word.text for each in arguments for word in words_of(each, values))


def _substituted(node: Node, values: Values) -> str:
    """``$(echo text)`` is its text, and the script's own folder is where its file stands; other output is not known."""
    own = re.search(r"dirname.*(?:BASH_SOURCE(?:\[0\])?\}?|\$0)\"?\)?\"?((?:/[\w.-]+)*)", source_of(node))
    if own:
        return f".{own[1]}"
    inner = [child for child in node.named_children if child.type == "command"]
    if len(inner) == 1:
        words = [word.text for child in inner[0].named_children for word in words_of(child, values)]
        if words[:1] in (["echo"], ["printf"]) and not any("$" in word for word in words):
            return " ".join(words[1:])
    return source_of(node)
