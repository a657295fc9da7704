"""The formulas of ``klgrad derive --phi``: a small grammar, read into sympy and never evaluated as Python.

    formula: numbers, r, delta (= -log r), + - * / ^ (or **), parentheses, log, exp, sqrt, abs

Exponents are numbers. Python's parser gives the tree and only the nodes named here are let through.
"""

from __future__ import annotations

import ast
from typing import Any

LONGEST = 200
LARGEST_EXPONENT = 20
ALLOWED = "write numbers, r (= pi_ref / pi), delta (= -log r), + - * / ^, parentheses, log, exp, sqrt and abs"
FUNCTIONS = {"log": "log", "exp": "exp", "sqrt": "sqrt", "abs": "Abs"}


def parse(text: str) -> Any:
    """The formula as a sympy expression in the positive symbol ``r``.

    Raises:
        ValueError: for anything outside the grammar, naming the piece; for a formula that is not real and finite at
            every positive r that was tried.
    """
    import sympy

    if len(text) > LONGEST:
        raise ValueError(f"the formula is {len(text)} characters long: at most {LONGEST} are read")
    source = text.replace("^", "**").strip()
    for mark in "#;\\\n":
        if mark in source:
            raise ValueError(f"{mark!r} in the formula is not allowed: {ALLOWED}")
    try:
        tree = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is no formula: {_complaint(source, error)}; {ALLOWED}") from None
    try:
        formula = _Reader(source).read(tree)
    except RecursionError:
        raise ValueError(f"{text!r} is nested too deeply: simplify it") from None
    if formula.has(sympy.zoo, sympy.oo, sympy.nan, sympy.I):
        raise ValueError(f"{text!r} is not a finite real number for every r: it contains {formula}")
    return formula


def symbol() -> Any:
    """The ratio r = pi_ref / pi."""
    import sympy

    return sympy.Symbol("r", positive=True)


def _complaint(source: str, error: BaseException) -> str:
    if not source:
        return "it is empty"
    if isinstance(error, SyntaxError) and error.msg:
        place = source[max((error.offset or len(source) + 1) - 1, 0) :][:12]
        return error.msg.split(". ")[0].rstrip(".") + (f" at {place!r}" if place else " at its end")
    return "it is nested too deeply"


class _Reader:
    """Walks the tree and builds the expression node by node."""

    def __init__(self, source: str) -> None:
        self.source = source

    def refuse(self, node: ast.AST, why: str) -> ValueError:
        piece = (ast.get_source_segment(self.source, node) or type(node).__name__).replace("**", "^")
        return ValueError(f"{piece!r} in the formula {why}: {ALLOWED}")

    def read(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return self.number(node)
        if isinstance(node, ast.Name):
            return self.name(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            return -self.read(node.operand) if isinstance(node.op, ast.USub) else self.read(node.operand)
        if isinstance(node, ast.BinOp):
            return self.binary(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        raise self.refuse(node, "is not allowed")

    def number(self, node: ast.Constant) -> Any:
        import sympy

        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            raise self.refuse(node, "is not a real number")
        if not abs(node.value) < 1e9:
            raise self.refuse(node, "is larger than a coefficient may be")
        return sympy.Rational(repr(node.value))

    def name(self, node: ast.Name) -> Any:
        import sympy

        if node.id == "r":
            return symbol()
        if node.id == "delta":
            return -sympy.log(symbol())
        raise self.refuse(node, "is unknown")

    def binary(self, node: ast.BinOp) -> Any:
        left = self.read(node.left)
        if isinstance(node.op, ast.Pow):
            return left ** self.exponent(node.right)
        right = self.read(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            if right.is_zero:
                raise self.refuse(node, "divides by zero")
            return left / right
        raise self.refuse(node, "uses an operator that is not allowed")

    def exponent(self, node: ast.AST) -> Any:
        value = self.read(node)
        if not value.is_Rational or abs(value) > LARGEST_EXPONENT:
            raise self.refuse(node, f"is no exponent between -{LARGEST_EXPONENT} and {LARGEST_EXPONENT}")
        return value

    def call(self, node: ast.Call) -> Any:
        import sympy

        if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS:
            raise self.refuse(node.func, "is no function of the grammar")
        if len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
            raise self.refuse(node, "must have exactly one argument")
        return getattr(sympy, FUNCTIONS[node.func.id])(self.read(node.args[0]))
