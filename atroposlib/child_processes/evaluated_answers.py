"""Parses an answer before a scorer of reasoning-gym evaluates it by `eval` or by sympy's `parse_expr`, which calls it.

    answer ──▶ scorer ──▶ eval | sympy's eval_expr: in the child both are `Guard`
                               └──▶ ast.parse ──▶ the task's mathematics: evaluated, with nothing else in reach
                                             └──▶ calls, attributes, other names: `rejected`, which scores 0

The guard sees the very text that would be evaluated, after sympy has rewritten it: `5!` is a call by then, and `x` is
`Symbol('x')`. Text that is not an expression raises SyntaxError, as it does without the guard. Words alone
(`unsolvable`, `red or blue`) are neither mathematics nor code; the scorer gets them as before.
"""

import ast
import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType

NUMBERS = frozenset({"Integer", "Float", "Rational"})  # what sympy makes of 5, 0.5 and 0.[3]
TRIGONOMETRIC = {
    f"{inverse}{name}{hyperbolic}"
    for inverse in ("", "a")
    for name in "sin cos tan cot sec csc".split()
    for hyperbolic in ("", "h")
}
ELEMENTARY = NUMBERS | {
    "Symbol",
    "sqrt",
    "cbrt",
    "exp",
    "log",
    "ln",
    "Abs",
    "abs",
    "sign",
    "pi",
    "E",
    "I",
    *TRIGONOMETRIC,
}

# The tasks whose scorer evaluates the answer, and the names that an answer may use. `Symbol` stands for all variables.
EVALUATED: Mapping[str, frozenset[str]] = {
    "countdown": NUMBERS,
    "puzzle24": NUMBERS,
    "polynomial_multiplication": NUMBERS | {"Symbol"},
    "simple_integration": ELEMENTARY,
    "intermediate_integration": ELEMENTARY | {"erf", "erfi", "li", "Ei", "Si", "Ci", "gamma"},
    # Lists of numbers, or of letters.
    "binary_matrix": frozenset(),
    "n_queens": frozenset(),
    "spiral_matrix": frozenset(),
    "string_insertion": frozenset(),
}

OPERATIONS = (
    *(ast.Expression, ast.Load, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.Name, ast.Call),
)
VALUES = (ast.Constant, ast.List, ast.Set, ast.Dict, ast.Subscript, ast.Slice)
CODE = (
    *(ast.Attribute, ast.Lambda, ast.NamedExpr, ast.JoinedStr, ast.FormattedValue, ast.comprehension),
    *(ast.Await, ast.Yield, ast.YieldFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
)
DECIMAL = re.compile(r"[0-9_]*\.?[0-9_]*(?:[eE][-+]?[0-9_]+)?")
LONGEST = 100_000  # characters that are parsed


class Rejected(ValueError):
    """The answer holds what is not mathematics of its task."""


class Guard:
    """Stands in for `eval` while answers are scored: `rejected` then tells why an answer was not evaluated."""

    def __init__(self) -> None:
        self._names: frozenset[str] | None = None
        self.rejected: str | None = None

    @contextlib.contextmanager
    def scoring(self, task: str, answer: str, known: str) -> Iterator[None]:
        """Wrap the scoring of one `answer`. Where sympy left an integral in the `known` answer, so may this one."""
        self._names, self.rejected = (
            EVALUATED.get(task, frozenset()) | ({"Integral"} if "Integral(" in known else set()),
            None,
        )
        try:
            if task in EVALUATED:  # code is rejected even where evaluation would stumble over it
                with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                    self.rejected = forbidden_syntax(ast.walk(ast.parse(answer[:LONGEST])), self._names)
            yield
        finally:
            self._names = None

    def install(self, modules: Iterable[str]) -> None:
        """Replace `eval` in `modules`, and in sympy's parser, which the makers of entries use as well."""
        from sympy.parsing import sympy_parser

        unguarded = sympy_parser.eval_expr

        def eval_expr(code: str, local_dict: Mapping[str, object], global_dict: Mapping[str, object]) -> object:
            if self._names is None:
                return unguarded(code, local_dict, global_dict)
            compiled = self._compiled(code, self._names | local_dict.keys(), strings=False)
            reachable = {name: global_dict[name] for name in {"Symbol", *self._names} if name in global_dict}
            return eval(compiled, {**reachable, "__builtins__": {}}, local_dict)

        sympy_parser.eval_expr = eval_expr
        for name in modules:
            vars(sys.modules[name])["eval"] = self._literal

    def _literal(self, text: str) -> object:
        """The value of `text`, made of values and operators. Names have no value, not even the scorer's own."""
        return eval(self._compiled(text, frozenset(), strings=True), {"__builtins__": {}})

    def _compiled(self, text: str, names: frozenset[str], strings: bool) -> CodeType:
        if len(text) > LONGEST:
            self.rejected = f"it has {len(text)} characters; at most {LONGEST} are evaluated"
            raise Rejected(self.rejected)
        try:
            tree = ast.parse(text.lstrip(" \t"), mode="eval")  # blanks as `eval` treats them
            self.rejected = self.rejected or objection(tree, names, strings)
        except (RecursionError, MemoryError):
            self.rejected = "it is nested too deeply"
        if self.rejected:
            raise Rejected(self.rejected)
        return compile(tree, "<answer>", "eval")


def objection(tree: ast.Expression, names: frozenset[str], strings: bool) -> str | None:
    """Return the reason why `tree` is not made of values, operators and `names` alone; None if it is.

    Other names pass only as words, that is with no value beside them.
    """
    nodes = list(ast.walk(tree))
    for node in nodes:
        if not isinstance(node, OPERATIONS + VALUES):
            return f"{type(node).__name__} is not mathematics"
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    rewritten = [call for call in calls if _is_rewritten(call)]
    parts_of_calls = {id(call.func) for call in calls} | {id(call.args[0]) for call in rewritten}
    free = [node for node in nodes if id(node) not in parts_of_calls]
    values = [node for node in free if isinstance(node, VALUES)]
    words = [node.id for node in free if isinstance(node, ast.Name) and node.id not in names]
    if "Symbol" not in names:
        words += [ast.literal_eval(call.args[0]) for call in rewritten if _name(call.func) == "Symbol"]

    if not strings and any(
        isinstance(value, ast.Constant) and isinstance(value.value, str | bytes) for value in values
    ):
        return "text is not mathematics"
    if words and (values or not all(word.isalpha() for word in words)):
        return f"the name {words[0][:40]} is not part of this task's mathematics"
    own = {id(call) for call in rewritten}
    return forbidden_syntax((node for node in nodes if id(node) not in own), names)


def forbidden_syntax(nodes: Iterable[ast.AST], names: frozenset[str]) -> str | None:
    """The first of `nodes` that can run code: a call of what is not in `names`, an attribute, a function, a loop."""
    for node in nodes:
        if isinstance(node, CODE):
            return f"{type(node).__name__} is not mathematics"
        if isinstance(node, ast.Call) and (node.keywords or _name(node.func) not in names - {"Symbol"}):
            return f"a call of {_name(node.func)[:40] or 'an expression'} is not part of this task's mathematics"
    return None


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else ""


def _is_rewritten(call: ast.Call) -> bool:
    """Return whether this is Symbol('x') or Float('0.5'), which is what sympy makes of x and 0.5."""
    text = (
        call.args[0].value
        if len(call.args) == 1 and isinstance(call.args[0], ast.Constant) and not call.keywords
        else None
    )
    if not isinstance(text, str):
        return False
    return _name(call.func) == "Symbol" or (_name(call.func) == "Float" and DECIMAL.fullmatch(text) is not None)
