"""The LaTeX of the derivations: its macros, and the same mathematics as plain text and as MathML."""

from __future__ import annotations

import re

# one argument where the text has {}
MACROS = {
    r"\Emu": r"\mathbb{E}_\mu\left[{}\right]",
    r"\E": r"\mathbb{E}\left[{}\right]",
    r"\trVar": r"\mathrm{tr}\,\mathrm{Var}\left[{}\right]",
    r"\Var": r"\mathrm{Var}\left[{}\right]",
    r"\KLt": r"\mathrm{KL}_t(\pi\|q)",
    r"\KLu": r"\mathrm{KL}_u(\pi\|q)",
    r"\fKLt": r"\mathrm{KL}_t(q\|\pi)",
    r"\KL": r"\mathrm{KL}(\pi\|q)",
    r"\scoret": r"\nabla\log\pi_t",
    r"\score": r"\nabla\log\pi(y)",
}

_SYMBOLS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "theta": "θ",
    "lambda": "λ", "mu": "μ", "nu": "ν", "pi": "π", "rho": "ρ", "sigma": "σ", "phi": "φ", "varphi": "φ", "chi": "χ",
    "psi": "ψ", "varepsilon": "ε",
    "nabla": "∇", "sum": "Σ", "prod": "Π", "int": "∫", "infty": "∞", "partial": "∂", "cdot": "·", "times": "×",
    "le": "≤", "ge": "≥", "ne": "≠", "approx": "≈", "propto": "∝", "cdots": "...", "dots": "...", "|": "‖", "mid": "|",
    "lim": "lim", "quad": "   ", "qquad": "   ", ",": " ", ";": " ", " ": " ", "left": "", "right": "",
}  # fmt: skip
_WORDS = ("log", "exp", "min", "max", "cos")
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)


def expand(tex: str) -> str:
    """The same LaTeX without this module's macros."""
    while match := re.search(r"\\(?:" + "|".join(name[1:] for name in MACROS) + r")(?![A-Za-z])", tex):
        body, rest = MACROS[match[0]], tex[match.end() :]
        if "{}" in body:
            end = _closing(rest)
            body, rest = body.replace("{}", rest[1:end]), rest[end + 1 :]
        tex = tex[: match.start()] + body + rest
    return tex


def _closing(text: str) -> int:
    """Where the group that opens a text ends."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced braces in {text!r}")


def mathml(tex: str, *, block: bool = True) -> str:
    """A ``<math>`` element, which browsers typeset without script or network; displayed, or within a line."""
    from latex2mathml.converter import convert

    spaced = re.sub(r"(?<=[A-Za-z})])\\log", r"\\,\\log", expand(tex))  # operators get their spaces, as TeX gives them
    spaced = re.sub(r"\\log(?![A-Za-z(])\s*", r"\\log\\,", spaced)
    if block:
        spaced = re.sub(r"\\(sum|prod)_", r"\\\1\\limits_", spaced)
    return str(convert(spaced, display="block" if block else "inline"))


def plain(tex: str) -> str:
    """The formula as one readable line of Unicode, for a terminal.

    Raises:
        ValueError: for LaTeX outside the subset that the derivations use, naming it.
    """
    return _tidy(_read(_TOKEN.findall(expand(tex)), top=True))


def _read(tokens: list[str], *, top: bool = False) -> str:
    """Tokens up to the brace that closes this group."""
    out: list[str] = []
    while tokens:
        token = tokens.pop(0)
        if token == "}":
            if top:
                raise ValueError("unbalanced braces: one closes that never opened")
            return "".join(out)
        if token in "_^":
            out.append(_script(token, _argument(tokens)))
        elif token in (r"\frac", r"\tfrac"):
            over, under = _argument(tokens).strip(), _argument(tokens).strip()
            out.append(f"({_grouped(over, '[+/-]')}/{_grouped(under, '[ +/-]')})")
        elif token == r"\sqrt":
            out.append(f"sqrt({_argument(tokens).strip()})")
        elif token in (r"\mathrm", r"\mathbb", r"\text", r"\operatorname"):
            out.append(_argument(tokens))
        elif token == "{":
            out.append(_read(tokens))
        elif token.startswith("\\"):
            out.append(_symbol(token[1:]))
        else:
            out.append(" " if token.isspace() else token)
    if not top:
        raise ValueError("unbalanced braces: one opens that never closes")
    return "".join(out)


def _argument(tokens: list[str]) -> str:
    while tokens and tokens[0].isspace():
        tokens.pop(0)
    token = tokens.pop(0) if tokens else ""
    if token == "{":
        return _read(tokens)
    return _symbol(token[1:]) if token.startswith("\\") else token


def _symbol(name: str) -> str:
    if name in _WORDS:
        return f" {name} "
    if name not in _SYMBOLS:
        raise ValueError(f"LaTeX command \\{name} has no plain form: add it to _SYMBOLS")
    return _SYMBOLS[name]


def _script(kind: str, inner: str) -> str:
    inner = inner.replace(" ", "") if kind == "_" else inner.strip()
    if kind == "^" and inner.isdigit():
        return inner.translate(_SUPERSCRIPTS)
    if kind == "^":
        return f"^{inner}" if len(inner) == 1 else f"^({inner})"
    return f"_{inner}" if len(inner) <= 2 else f"_{{{inner}}}"


def _grouped(text: str, loose: str) -> str:
    """In parentheses, if one of these characters stands outside all parentheses."""
    bare = text
    while (inner := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = inner
    return f"({text})" if re.search(loose, bare.strip()) else text


def _tidy(text: str) -> str:
    """Spaces where a reader wants them: around big operators and between factors, none inside brackets."""
    text = re.sub(r"([ΣΠ](?:_(?:\{[^}]*\}|[<≤≥]?\w))?)(?=[^\s_)\]{])", r"\1 ", text)
    text = re.sub(r"(?<=[\w)\]⁰-⁹²³¹])(?=[ΣΠ∇])|(?<=\))(?=[A-Za-zα-ω])", " ", text)
    text = re.sub(r"(log|exp|min|max|cos) +(?=[(_])", r"\1", text)
    text = re.sub(r"(^|[(=,\[:/] ?)- +", r"\1-", text.strip())
    text = re.sub(r"(?<=[(\[∇]) +| +(?=[)\],])", "", text)
    text = re.sub(r"\[\(([^()]*)\)\]", r"[\1]", text)
    return re.sub(r" {2,}", " ", text).replace("^*", "*").strip()
