"""What is done to the code: cosmic-ray's operators as far as they say something here, and terms that go missing.

Replacing one operator by each other one (+ by %, << or **) makes many mutants that any test kills; a wrong sign, an
inverted ratio, a bound off by one and a missing term are what mathematics is got wrong by.
"""

import re

import parso
from cosmic_ray import plugins
from cosmic_ray.operators.boolean_replacer import AddNot
from cosmic_ray.operators.operator import Example, Operator
from parso.tree import search_ancestor

ARITHMETIC = "Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Pow_Mul|BitAnd_BitOr"
COMPARISONS = "Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot|IsNot_Is"
OTHERS = "ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd|NumberReplacer"
CHOSEN = re.compile(
    rf"core/(ReplaceBinaryOperator_({ARITHMETIC})|ReplaceComparisonOperator_({COMPARISONS})|{OTHERS}"
    r"|ReplaceUnaryOperator_(USub_UAdd|Delete_Not|Delete_Invert)|ZeroIterationForLoop|Replace(Break|Continue)With\w+)"
    r"|klgrad/\w+"
)
LATER = re.compile("Statement|NumberReplacer|ReplaceTrue|ReplaceFalse|Iteration")
# functions whose value has the shape of an argument's: leaving the call out is a mutant worth making
NUMERIC = {"abs", "clip", "cumsum", "_cumulative", "exp", "expm1", "log1p", "maximum", "minimum", "sign", "swap"}
NUMERIC |= {"sum", "sqrt", "swapaxes", "unique", "where", "broadcast_to", "_exp_tail", "_expand", "number", "strip"}


def _leaf(text, like):
    """Code in the place of ``like``, on its line."""
    leaf = parso.parse(text.strip()).children[0]
    first = leaf.get_first_leaf()
    first.prefix = like.get_first_leaf().prefix
    return leaf


class Term(Operator):
    """A sum or a product loses one of its terms."""

    @staticmethod
    def _droppable(node):
        if node.type not in ("arith_expr", "term", "and_test", "or_test", "and_expr"):
            return []
        first = [0] if node.children[1].get_code().strip() in ("+", "-", "*", "and", "or", "&") else []
        return first + list(range(2, len(node.children), 2))

    def mutation_positions(self, node):
        for at in self._droppable(node):
            yield node.children[at].start_pos, node.children[at].end_pos

    def mutate(self, node, index):
        at = self._droppable(node)[index]
        kept = node.children[2:] if at == 0 else node.children[: at - 1] + node.children[at + 1 :]
        sign = "-" if at == 0 and node.children[1].get_code().strip() == "-" else ""
        return _leaf(f"({sign}{''.join(child.get_code() for child in kept).strip()})", node)

    @classmethod
    def examples(cls):
        return (Example("a - b", "(-b)"), Example("a * b / c", "(a * b)", occurrence=2))


class Call(Operator):
    """A numeric function is left out: one of its first arguments takes its place."""

    @staticmethod
    def _arguments(node):
        if node.type not in ("atom_expr", "power") or node.children[-1].type != "trailer":
            return []
        call, name = node.children[-1], node.children[-2]
        if call.children[0].value != "(" or name.get_last_leaf().value not in NUMERIC:
            return []
        inside = call.children[1]
        arguments = inside.children[::2] if inside.type == "arglist" else [inside]
        plain = [a for a in arguments if a.type != "argument" and a.get_code().strip() != ")"]
        return plain[1:3] if name.get_last_leaf().value == "where" else plain[:1]

    def mutation_positions(self, node):
        for argument in self._arguments(node):
            yield argument.start_pos, argument.end_pos

    def mutate(self, node, index):
        return _leaf(f"({self._arguments(node)[index].get_code().strip()})", node)

    @classmethod
    def examples(cls):
        return (Example("np.where(c, a, b)", "(a)"), Example("np.clip(x, 0, 1)", "(x)"))


class Statement(Operator):
    """An assignment, a call, a return or a raise in a function does not happen."""

    KINDS = ("expr_stmt", "atom_expr", "power", "return_stmt", "raise_stmt", "yield_expr")

    def mutation_positions(self, node):
        if node.type == "simple_stmt" and node.children[0].type in self.KINDS and search_ancestor(node, "funcdef"):
            yield node.start_pos, node.children[0].end_pos

    def mutate(self, node, index):
        node.children[0] = _leaf("pass", node)
        return node

    @classmethod
    def examples(cls):
        return (Example("def f():\n    x = 1\n", "def f():\n    pass\n"),)


class Not(AddNot):
    """A condition at run time is turned round, where replacing its == or its not does not do so already."""

    def mutation_positions(self, node):
        for position in super().mutation_positions(node):
            condition = node.children[1 if isinstance(node, self.NODE_TYPES) else 2]
            other = condition.children[1].get_code().strip() if condition.type == "comparison" else ""
            turned = other in ("==", "!=", "is", "is not") or condition.type == "not_test"
            if not turned and condition.get_code().strip() != "TYPE_CHECKING":
                yield position


OWN = {operator.__name__: operator for operator in (Term, Call, Statement, Not)}
plugins.OPERATOR_PROVIDERS["klgrad"] = OWN
