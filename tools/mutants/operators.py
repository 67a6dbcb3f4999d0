"""The changes that mutation testing makes to a source file, one at a time.

Each operator stands for a mistake that a programmer could make and a reviewer could miss: a boundary off by one, a
condition the wrong way around, a call or an error left out. Operators that mostly produce equivalent programs (changed
messages, changed buffer sizes) are left out on purpose.
"""

import ast
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}
# Without these calls, only what a person reads changes.
_SPEECH = {"log", "print", "warnings"}
# Calls that release what the end of the process releases too.
_RELEASES = {"close", "join", "shutdown", "stop"}
# Keywords that change speed, the text of a repr, or the end of a process, but no result.
_NO_RESULT = {"copy", "daemon", "repr", "show_progress"}
# Functions that read a clock, which never shows the very instant of a deadline.
_CLOCKS = {"monotonic", "perf_counter", "thread_time"}
_LONGEST = 140


@dataclass(frozen=True)
class Mutation:
    """One change: the source between *start* and *end* (byte offsets of the UTF-8 text) becomes *replacement*."""

    line: int
    start: int
    end: int
    replacement: str
    description: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.replacement.encode() + source[self.end :]


def mutations(source: bytes) -> list[Mutation]:
    """Return all mutations of a Python file, in the order of their position."""
    tree = ast.parse(source)
    finder = _Finder(source)
    finder.visit(tree)
    return sorted(
        finder.found, key=lambda mutation: (mutation.start, mutation.end, mutation.description)
    )


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes) -> None:
        self.source = source
        self.found: list[Mutation] = []
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def visit_FunctionDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> None:
        # Decorators, annotations and defaults are declarations: only bodies are changed.
        for statement in node.body:
            if node.name == "__init__" and isinstance(statement, ast.Assign):
                # Without its first value an attribute is missing, which every test notices, or it is never read.
                self.visit(statement.value)
            else:
                self.visit(statement)

    visit_ClassDef = visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_keyword(self, node: ast.keyword) -> None:
        is_strict = ast.unparse(node) == "strict=True"
        # zip(..., strict=True) asserts that the program itself made both of the same length. It changes no result, and
        # unequal lengths in somebody's input are an error with a message before they get there.
        if node.arg not in _NO_RESULT and not is_strict:
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        is_declaration = isinstance(node.value, ast.Call) and _root_name(node.value.func) == "field"
        if node.value is not None and not is_declaration:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Call):
            return  # a docstring, a yield
        if _root_name(node.value.func) in _SPEECH:
            return
        if isinstance(node.value.func, ast.Attribute) and node.value.func.attr in _RELEASES:
            return
        self._replace(node, "pass", f"remove the call {ast.unparse(node.value.func)}(...)")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        is_declaration = isinstance(node.exc, ast.Name) and node.exc.id == "NotImplementedError"
        if node.exc is not None and not is_declaration:  # the body of an abstract method never runs
            self._replace(node, "pass", "remove the raise")
        # The arguments of an exception are text for people.

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Attribute):
            self._replace(node, "pass", f"remove the assignment to {ast.unparse(target)}")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            condition = ast.unparse(node.test)
            self._replace(node.test, f"not ({condition})", f"negate the condition {condition}")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(node, node.operand, f"remove 'not' from {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        swapped = ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        self._replace(node, swapped, f"swap and / or in {ast.unparse(node)}")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operator = node.ops[0]
        has_clock = _reads_clock(node.left) or _reads_clock(node.comparators[0])
        is_deadline = has_clock and isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        if len(node.ops) == 1 and not is_deadline:
            other = _COMPARISONS[type(operator)]()
            self._replace(node, ast.Compare(node.left, [other], node.comparators))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        swapped_type = _ARITHMETIC.get(type(node.op))
        if swapped_type is not None and not _is_text(node.left) and not _is_text(node.right):
            self._replace(node, ast.BinOp(node.left, swapped_type(), node.right))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, ast.Constant(not node.value))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave f-strings alone: most of them are messages."""

    def _replace(
        self, node: ast.expr | ast.stmt, by: ast.expr | str, description: str = ""
    ) -> None:
        assert node.end_lineno is not None and node.end_col_offset is not None
        new = by if isinstance(by, str) else ast.unparse(by)
        description = description or f"{ast.unparse(node)} becomes {new}"
        replacement = new if isinstance(by, str) else f"({new})"
        start = self._line_starts[node.lineno - 1] + node.col_offset
        end = self._line_starts[node.end_lineno - 1] + node.end_col_offset
        if len(description) > _LONGEST:
            description = f"{description[:_LONGEST]}..."
        self.found.append(Mutation(node.lineno, start, end, replacement, description))


def _root_name(function: ast.expr) -> str:
    while isinstance(function, ast.Attribute):
        function = function.value
    return function.id if isinstance(function, ast.Name) else ""


def _reads_clock(node: ast.expr) -> bool:
    functions = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    return any(
        isinstance(function, ast.Attribute) and function.attr in _CLOCKS for function in functions
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(getattr(node, "value", None), str) or isinstance(node, ast.JoinedStr)
