"""A Jinja environment that limits the time and the output of templates.

A chat template comes with a model or a recipe, so it may come from anywhere. Jinja's sandbox keeps it from running
code, but not from looping for years or filling the memory. :class:`BoundedEnvironment` meters a rendering inside the
thread that renders, so it needs no signal, thread or process and works in workers of a data loader:

* each iteration of a loop, each call and each filter checks the time;
* each text or container that is made is counted by its size, and what could make a huge one in a single step (``*``,
  ``**``, ``replace``, ``join``, ``center``, ``format``, ...) is counted before the step.

A template cannot avoid the meter, because the statements and expressions that can repeat or grow are rewritten in its
syntax tree before Jinja compiles it.
"""

# ruff: noqa: N802, N815 (Jinja finds the methods of a visitor by the names of its nodes)

from __future__ import annotations

import functools
import importlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
"""Processor time of one rendering."""
MAX_SIZE = 2**25
"""Characters and items that one rendering may create, including those that it discards."""
MAX_SOURCE = 2**20
"""Characters of a template."""

_MAX_SLOW_INPUT = 2**15
_MAX_NUMBER_BITS = 2**14
_SLOW = frozenset({"pprint", "striptags", "title", "urlize", "wordcount", "wordwrap", "xmlattr"})
"""Filters that take more than linear time."""
_SHALLOW = frozenset(
    {
        "abs",
        "attr",
        "count",
        "d",
        "default",
        "first",
        "float",
        "int",
        "items",
        "last",
        "length",
        "list",
        "map",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "round",
        "select",
        "selectattr",
    }
)
"""Filters that read only the outermost container."""
_PADDING = frozenset(
    {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "to_bytes", "zfill"}
)
"""Filters and methods whose output is as long as a number in their arguments."""
_COMPARING = frozenset(
    {
        "==",
        "!=",
        "<",
        "<=",
        ">",
        ">=",
        "eq",
        "equalto",
        "ne",
        "lt",
        "lessthan",
        "le",
        "gt",
        "greaterthan",
        "ge",
        "in",
    }
)
_WIDE = re.compile(r"%[^a-zA-Z%]*\d{5,}|\{[^{}]*\d{5,}")
# A width that is an argument itself, as in %*d or {:{}}.
_GIVEN_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
_CONTAINERS = (list, tuple, dict, set, frozenset, range)


class TemplateTooCostly(TemplateRuntimeError):
    """A rendering exceeded the limit of time or size."""


class _Meter(threading.local):
    """The remaining time and size of the current rendering, separately for each thread."""

    left = MAX_SIZE
    ends = float("inf")
    cpu_ends = float("inf")

    def start(self) -> None:
        """Begin another rendering."""
        self.left = MAX_SIZE
        self.ends = time.monotonic() + MAX_SECONDS
        self.cpu_ends = time.thread_time() + MAX_SECONDS

    def spend(self, size: int) -> None:
        """Count *size* characters or items. Raises :class:`TemplateTooCostly`."""
        self.left -= size
        if self.left < 0:
            raise TemplateTooCostly(f"the template makes more than {MAX_SIZE} characters and items")

    def check_time(self) -> None:
        """Raise :class:`TemplateTooCostly` after ``MAX_SECONDS`` of processor time."""
        # The clock is checked first because it is cheap to read. It does not decide: other programs may use the
        # processor meanwhile.
        if time.monotonic() > self.ends and time.thread_time() > self.cpu_ends:
            raise TemplateTooCostly(f"the template takes more than {MAX_SECONDS:g} seconds")


_meter = _Meter()


def bound_chat_templates() -> None:
    """Make transformers render chat templates in a :class:`BoundedEnvironment`, in this process and its forks."""
    # Patch for transformers 5.17 to 5.24: it creates the environment inside a private function, with the class that its
    # module imported from jinja2, and has no setting for another class.
    rendering: Any = importlib.import_module("transformers.utils.chat_template_utils")
    if rendering.ImmutableSandboxedEnvironment is not BoundedEnvironment:
        rendering.ImmutableSandboxedEnvironment = BoundedEnvironment
        rendering._compile_jinja_template.cache_clear()  # it holds templates of the class before


class _BoundedTemplate(jinja2.Template):
    """A template whose every rendering starts with a fresh meter."""

    def new_context(self, *args: Any, **kwargs: Any) -> Context:
        _meter.start()
        return super().new_context(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with limits of time and size; output within them is the same."""

    template_class = _BoundedTemplate
    # Jinja calls call_binop for these only. The other operators make nothing large.
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters = _Guarded(self.filters)
        for name in _COMPARING & self.tests.keys():
            compare: Any = self.tests[name]
            self.tests[name] = _guarded(name, compare)
        self.globals.pop("lipsum", None)  # generates any amount of text

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """The Python source of a template: constants are folded here, so the meter starts here, too."""
        _meter.start()
        metered = _Metering().visit(source)
        return super()._generate(metered, *args, **kwargs)

    def _parse(self, source: str, *args: Any, **kwargs: Any) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise jinja2.TemplateSyntaxError(f"a template has at most {MAX_SOURCE} characters", 1)
        return super()._parse(source, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator in ("*", "**"):
            _check_growth(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        _meter.spend(_size(result))
        return result

    # The names are Jinja's: a template may pass keywords named self or context.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _meter.check_time()
        name, owner = _called(__obj)
        if isinstance(owner, str | bytes | int | list | tuple):
            args = _check_work(name, (owner, *args), kwargs)[1:]
        result = super().call(__context, __obj, *args, **kwargs)
        _meter.spend(1 + _size(result))
        return result


class _Guarded(dict[str, Callable[..., Any]]):
    """Filters that are counted, including filters that are added later."""

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        guarded: dict[str, Callable[..., Any]] = {
            name: _guarded(name, filters[name]) for name in filters
        }
        super().__init__(guarded | _METERS)

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _guarded(name, function))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test, so that it is counted before and after it runs."""

    # wraps() also copies the attribute that makes Jinja pass the context or environment.
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _meter.check_time()
        result = function(*_check_work(name, args, kwargs), **kwargs)
        _meter.spend(1 + _size(result))
        return result

    return guarded


def _called(function: Any) -> tuple[str, Any]:
    """Return the name and the owner of a method. Jinja wraps ``str.format``."""
    function = getattr(function, "__wrapped__", function)
    return getattr(function, "__name__", ""), getattr(function, "__self__", None)


def _check_work(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Count the work of a filter or method before it runs. Returns the arguments, with lists instead of iterators."""
    if name in _SHALLOW:
        if name == "round" and max(_numbers(args[1:], kwargs), default=0) > 100:
            raise TemplateTooCostly("the template rounds to more than 100 digits")
        return args
    # Weighing an iterator would consume it.
    args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
    values = (*args, *kwargs.values())
    weight = sum(_weigh(value) for value in values if isinstance(value, _CONTAINERS))
    texts = [value for value in args if isinstance(value, str | bytes)]
    text = texts[0] if texts else ""
    if name in _SLOW and weight + len(text) > _MAX_SLOW_INPUT:
        raise TemplateTooCostly(
            f"the template uses {name} on more than {_MAX_SLOW_INPUT} characters"
        )
    if weight:
        _meter.spend(weight)
    if name in _PADDING or name == "tojson":
        _check_padding(name, text, weight, max(_numbers(args, kwargs), default=0))
    if name in ("replace", "join", "translate"):
        _meter.spend(_spread(name, args, kwargs))
    if name in ("format", "format_map") and text:
        _check_format(str(text), [*args[1:], *kwargs.values()])
    if name == "sum" and _sums_lists(args):
        # Each addition copies the sum of the lists before it.
        _meter.spend(weight * weight)
    return args


def _check_padding(name: str, text: str | bytes, weight: int, width: int) -> None:
    """Count the characters that a filter adds, at most *width* for each item, line or tab."""
    if width:
        repeated = "\n" if name == "indent" else "\t"
        _meter.spend(width * (1 + weight + _count(text, repeated)))


def _sums_lists(args: tuple[Any, ...]) -> bool:
    items = chain.from_iterable(value for value in args if isinstance(value, list))
    return any(isinstance(item, list | tuple) for item in items)


def _count(text: str | bytes, what: str) -> int:
    return text.count(what) if isinstance(text, str) else text.count(what.encode())


def _numbers(args: Any, kwargs: Mapping[str, Any]) -> list[int]:
    """Return the absolute values of the integers among the arguments."""
    numbers = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and not isinstance(value, bool):
            numbers.append(abs(value))
    return numbers


def _spread(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return an upper bound of the size of the text that ``replace``, ``join`` or ``translate`` makes."""
    texts = [value for value in (*args, *kwargs.values()) if isinstance(value, str | bytes)]
    containers = [value for value in args if isinstance(value, _CONTAINERS)]
    if name == "join":
        num_items = sum(len(value) for value in containers)
        longest_separator = max((len(text) for text in texts), default=0)
        return num_items * longest_separator
    if name == "replace" and len(texts) >= 3:
        text, old, new = texts[:3]
        count = text.count(old) if type(text) is type(old) else 0  # type: ignore[arg-type]
        return count * len(new)
    longest = 1
    weights = []
    for table in containers:
        if isinstance(table, dict):
            weights += [_weigh(item) for item in table.values()]
    if weights:
        longest = max(weights)
    return sum(len(text) for text in texts) * longest


def _check_format(text: str, values: Any) -> None:
    """Count the output of a format with widths before it is made."""
    if _WIDE.search(text):
        raise TemplateTooCostly("the template formats a text with a width of more than 9999")
    given = list(values) if isinstance(values, list | tuple) else [values]
    if _GIVEN_WIDTH.search(text):
        _meter.spend(max(_numbers(given, {}), default=0))
    _meter.spend(sum(_weigh(value) for value in given))
    if isinstance(values, dict):
        _meter.spend(_weigh(values) * text.count("%"))


def _check_growth(operator: str, left: Any, right: Any) -> None:
    """Count the result of ``*`` or ``**`` before it is computed."""
    if not isinstance(left, int) and isinstance(right, int):
        times = max(right, 0)
        if isinstance(left, str | bytes | list | tuple):
            _meter.spend(_weigh(left) * times)
    elif isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() + right.bit_length()
        if operator == "**":
            num_bits = left.bit_length() * right
        if abs(num_bits) > _MAX_NUMBER_BITS:
            raise TemplateTooCostly(
                f"the template computes a number of more than {_MAX_NUMBER_BITS} bits"
            )
    elif isinstance(right, str | bytes | list | tuple) and isinstance(left, int):
        _meter.spend(_weigh(right) * max(left, 0))


def _size(value: Any) -> int:
    """Return the number of characters of a text, or of items of a container; 1 for other values."""
    return len(value) if isinstance(value, (str, bytes, *_CONTAINERS)) else 1


def _weigh(value: Any) -> int:
    """Return the number of characters and items of a value and of all values in it.

    A value that occurs twice counts twice, because it is also written or compared twice. Raises
    :class:`TemplateTooCostly`.
    """
    total = 0
    num_seen = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        total += _size(item)
        num_seen += 1
        if num_seen % 4096 == 0:
            _meter.check_time()
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
        elif isinstance(item, Namespace):
            # A namespace answers other names from its own entries.
            waiting.append(object.__getattribute__(item, "_Namespace__attrs"))
        if total > _meter.left:
            _meter.spend(total)
    return total


@pass_context
def _spend(context: Context, size: int) -> bool:
    """Count an iteration of a loop, or a call of a macro, that writes *size* characters of the template's own text."""
    _meter.check_time()
    _meter.spend(size)
    return True


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    """Count a value that is written or compared."""
    if type(value) is str:
        _meter.spend(len(value))
    elif isinstance(value, (*_CONTAINERS, Namespace, str)):
        _meter.spend(_weigh(value))
    return value


@pass_context
def _compared(context: Context, value: Any) -> Any:
    """Count the right side of a comparison: containers are compared item by item."""
    if isinstance(value, _CONTAINERS):
        _meter.spend(_weigh(value))
    return value


@pass_context
def _searched(context: Context, value: Any) -> Any:
    """Count the right side of ``in``: each item of a list is compared."""
    if isinstance(value, list | tuple):
        _meter.spend(_weigh(value))
    return value


@pass_context
def _sized(context: Context, value: Any) -> Any:
    """Count a slice of a text or list."""
    _meter.spend(_size(value))
    return value


@pass_context
def _concatenated(context: Context, values: list[Any]) -> str:
    """Count and compute the concatenation of values by ``~``."""
    _meter.spend(_weigh(values))
    return str_join(values)


# All have pass_context, because Jinja computes other filters of constants only once, when it
# compiles the template.
_METERS: dict[str, Callable[..., Any]] = {
    "__spend": _spend,
    "__weighed": _weighed,
    "__sized": _sized,
    "__concatenated": _concatenated,
    "__compared": _compared,
    "__searched": _searched,
}


class _Metering(NodeTransformer):
    """Inserts the meter into a template's syntax tree, wherever something repeats or grows."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        size = _own_text(node.body)
        self.generic_visit(node)
        node.body.insert(0, _statement(size, node))
        # An item that the loop's condition rejects does not reach the body, but takes time as well.
        if node.test is not None:
            node.test = nodes.And(
                _metered(nodes.Const(1), "__spend", node), node.test, lineno=node.lineno
            )
        return node

    def visit_Macro(self, node: Any) -> nodes.Node:
        size = _own_text(node.body)
        self.generic_visit(node)
        node.body.insert(0, _statement(size, node))
        return node  # type: ignore[no-any-return]

    visit_CallBlock = visit_Macro
    visit_Block = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        parts: list[nodes.Expr] = []
        for part in node.nodes:
            is_text = isinstance(part, nodes.TemplateData)
            parts.append(part if is_text else _metered(part, "__weighed", node))
        node.nodes = parts
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = [self.visit(part) for part in node.nodes]
        return _metered(nodes.List(parts, lineno=node.lineno), "__concatenated", node)

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        is_constant = all(isinstance(item, nodes.Const) for item in node.items)
        # The targets of an assignment, such as (a, b) in a loop, cannot be wrapped in a filter.
        is_assigned = getattr(node, "ctx", "load") != "load"
        if is_constant or is_assigned:
            return node  # type: ignore[no-any-return]
        return _metered(node, "__weighed", node)

    visit_Tuple = visit_List
    visit_Dict = visit_List

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _metered(node, "__sized", node)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        left: nodes.Expr = node.expr
        for operand in node.ops:
            is_search = operand.op in ("in", "notin")
            name = "__searched" if is_search else "__compared"
            right = operand.expr
            # A constant is as short as the template. What is still a List or Tuple here is constant too, because
            # visit_List replaced the others.
            is_cheap = isinstance(right, nodes.Const | nodes.List | nodes.Tuple)
            if isinstance(left, nodes.Const) and not is_search:
                is_cheap = True
            left = right
            if not is_cheap:
                operand.expr = _metered(right, name, node)
        return node


def _own_text(body: list[nodes.Node]) -> int:
    """Return the number of characters that one iteration of a loop or macro writes, without nested loops and macros."""
    total, waiting = 1, list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, nodes.TemplateData):
            total += len(node.data)
        elif not isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block):
            waiting += node.iter_child_nodes()
    return total


def _metered(node: nodes.Expr, name: str, place: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=place.lineno)


def _statement(size: int, place: nodes.Node) -> nodes.ExprStmt:
    return nodes.ExprStmt(_metered(nodes.Const(size), "__spend", place), lineno=place.lineno)
