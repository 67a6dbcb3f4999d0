"""A Jinja sandbox with limits of time and memory, for every template that this program renders.

A chat template comes with a model or a recipe, so it may come from anywhere. Jinja's sandbox keeps it from running
code, but not from looping for years or filling the memory. Here each iteration, call and filter checks the time, what
an operation reads and returns is counted, and operations that return much more than they read are checked before they
run. It needs no signal, thread or process, so it works in any thread and worker.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from itertools import permutations
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from automodel_ckpt.errors import RecipeError

MAX_SECONDS = 5.0
"""Processor time of one rendering."""
MAX_SIZE = 2**26
"""Characters and items that the operations of one rendering may read and return together."""
MAX_SOURCE = 2**18
"""Characters of a template."""
_MAX_BITS = 2**14
"""Bits of a number."""
_MAX_WIDTH = 1000
"""Width of an indentation or a format, and digits of a rounding."""
_BATCH = 4096
"""Characters and items that are counted at a time."""

_REMOVED = {"batch", "center", "pprint", "slice", "striptags", "sum", "urlize", "wordcount"}
_REMOVED |= {"wordwrap", "xmlattr"}
"""Filters that make much of little, or take more than linear time. Chat templates do not use them."""
_HIDDEN = {"center", "encode", "expandtabs", "ljust", "maketrans", "rjust", "translate", "zfill"}
"""Methods of texts that do the same."""
_SHALLOW = {"abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last"}
_SHALLOW |= {"length", "list", "map", "random", "reject", "rejectattr", "reverse", "select"}
_SHALLOW |= {"selectattr"}
"""Filters that read only the outermost container."""
_PERCENT = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*")
_BRACES = re.compile(r"\{[^{}]*:[^{}]*\{|\{[^{}]*")
_WIDE = re.compile(r"\d{4}")
_SCALARS = {type(None), bool, int, float, jinja2.Undefined}
_PLAIN = {str, list, dict, tuple, *_SCALARS}
_WITH_METHODS = (str, list, tuple, dict, Namespace, Macro, LoopContext, date)


class TemplateTooCostly(TemplateRuntimeError):
    """A rendering exceeded a limit of time or size."""


class _Meter(threading.local):
    """What is left of the limits of the current rendering, separately for each thread."""

    left = MAX_SIZE
    ends = cpu_ends = float("inf")

    def start(self) -> None:
        """Begin another rendering."""
        self.left = MAX_SIZE
        self.ends = time.monotonic() + MAX_SECONDS
        self.cpu_ends = time.thread_time() + MAX_SECONDS

    def spend(self, size: int) -> None:
        """Count *size* characters or items and check the time. Raises :class:`TemplateTooCostly`."""
        self.left -= max(size, 0)  # a text times a negative number
        if self.left < 0:
            raise TemplateTooCostly(f"the template handles more than {MAX_SIZE} characters")
        # The clock is checked first because it is cheap to read. It does not decide: other programs may use the
        # processor meanwhile.
        if time.monotonic() > self.ends and time.thread_time() > self.cpu_ends:
            raise TemplateTooCostly(f"the template takes more than {MAX_SECONDS:g} seconds")

    def weigh(self, value: Any) -> int:
        """Count a value and all values in it, as often as they occur in it. Returns the number."""
        total = counted = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            total += 1 + _size(item)
            if total - counted > _BATCH:
                self.spend(total - counted)
                counted = total
            if type(item) is str or type(item) in _SCALARS:
                continue
            if isinstance(item, Namespace):
                # A namespace answers other names from its own entries.
                item = object.__getattribute__(item, "_Namespace__attrs")
            if isinstance(item, Mapping):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, Collection) and not isinstance(item, str | bytes | range):
                waiting += item
        self.spend(total - counted)
        return total


_meter = _Meter()


def bound_chat_templates() -> None:
    """Make transformers render chat templates in a :class:`BoundedEnvironment`, in this process and its forks."""
    # Patch for transformers 5.17 to 5.24: it creates the environment inside a private function, with the class that its
    # module imported from jinja2, and has no setting for another class.
    rendering: Any = importlib.import_module("transformers.utils.chat_template_utils")
    if rendering.ImmutableSandboxedEnvironment is not BoundedEnvironment:
        rendering.ImmutableSandboxedEnvironment = BoundedEnvironment
        rendering._compile_jinja_template.cache_clear()  # it holds templates of the class before


@contextmanager
def template_errors(where: str) -> Iterator[None]:
    """Raise whatever a chat template raises as :class:`RecipeError` for *where*, a model or a key."""
    try:
        yield
    except Exception as error:  # a template can raise anything, for example divide by zero
        raise RecipeError(
            "the chat template cannot render this conversation",
            where=where,
            value=f"{type(error).__name__}: {str(error)[:500]}",
            hint="correct the conversation, or the template in the model's chat_template.jinja",
        ) from error


class _BoundedTemplate(jinja2.Template):
    """A template that starts with fresh limits at each rendering."""

    def new_context(self, *args: Any, **kwargs: Any) -> Context:
        _meter.start()
        return super().new_context(*args, **kwargs)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with limits of time and size; output within them is the same."""

    template_class = _BoundedTemplate
    # Jinja calls call_binop for these only. The other operators make nothing large.
    intercepted_binops = frozenset({"+", "*", "**", "%", "/", "//"})

    def __init__(self, *args: Any, finalize: Callable[[Any], Any] | None = None, **kwargs: Any):
        # Jinja passes each value that a template writes to finalize.
        counted = _read if finalize is None else lambda value: finalize(_read(value))
        super().__init__(*args, finalize=counted, **kwargs)
        self.filters = _Filters(_METERS)
        for name in jinja2.filters.FILTERS.keys() - _REMOVED:
            self.filters[name] = jinja2.filters.FILTERS[name]
        tests: dict[str, Any] = self.tests
        for name, test in tests.items():
            if name == "in" or test.__module__ == "_operator":
                tests[name] = _bounded(name, test)
        self.globals.pop("lipsum", None)  # generates any amount of text

    def _parse(self, source: str, *args: Any, **kwargs: Any) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise jinja2.TemplateSyntaxError(f"a template has at most {MAX_SOURCE} characters", 1)
        return super()._parse(source, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metering().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Rows of data may contain objects, such as images, that have methods to write files.
        if callable(value) and not isinstance(obj, _WITH_METHODS):
            return type(obj).__module__.startswith("jinja2.")
        if isinstance(obj, str) and attr in _HIDDEN:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            times = abs(right) if operator == "**" else 1
            if right.bit_length() + left.bit_length() * times > _MAX_BITS:
                raise TemplateTooCostly(f"the template computes with more than {_MAX_BITS} bits")
        elif operator == "%":
            _check_format(_PERCENT, left, right)
        elif operator == "*":
            _meter.spend(_size(left) * right if isinstance(right, int) else 0)
            _meter.spend(_size(right) * left if isinstance(left, int) else 0)
        result = super().call_binop(context, operator, left, right)
        _meter.spend(1 + _size(result))
        return result

    # The names are Jinja's: a template may pass keywords named self or context.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _meter.spend(1)
        # What a macro or a loop does with its arguments is counted there.
        if not isinstance(__obj, Macro | LoopContext):
            method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
            owner = getattr(method, "__self__", None)
            args = _listed(args)
            owners = (owner,) if isinstance(owner, str | list | tuple) else ()
            _check(f"str.{getattr(method, '__name__', '')}", (*owners, *args), kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        _meter.spend(_size(result))
        return result


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name. A filter that is added is counted."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _bounded(name, function))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test, so that it is counted before and after it runs."""
    has_context = hasattr(function, "jinja_pass_arg")

    # wraps() also copies the attribute that makes Jinja pass the context or environment.
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        args = _listed(args)
        if name in _SHALLOW:
            _meter.spend(1)
        else:
            _check(name, args[1:] if has_context else args, kwargs)
        result = function(*args, **kwargs)
        _meter.spend(_size(result))
        return result

    return bounded


def _listed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace iterators by lists: weighing an iterator would consume it."""
    if all(type(value) in _PLAIN for value in values):  # much faster than a look at each
        return values
    return tuple(list(value) if isinstance(value, Iterator) else value for value in values)


def _size(value: Any) -> int:
    """Return the number of characters of a text or of items in a container; 0 for other values."""
    if type(value) in _SCALARS:  # much faster than the test below
        return 0
    return len(value) if type(value) in _PLAIN or isinstance(value, Collection) else 0


def _check(name: str, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Count what a filter, test or method reads, and what some filters and methods add to it."""
    values = [*given, *options.values()]
    weights = [_meter.weigh(value) for value in values]
    name = name.removeprefix("str.") if name not in ("str.format", "str.format_map") else "braces"
    if name in ("indent", "round", "tojson"):
        rest = zip(values[1:], weights[1:], strict=True)
        widths = [abs(value) if isinstance(value, int) else weight for value, weight in rest]
        if max(widths, default=0) > _MAX_WIDTH:
            raise TemplateTooCostly(f"the template uses {name} with more than {_MAX_WIDTH}")
        _meter.spend(max(widths, default=0) * _num_indents(values[0]) if name != "round" else 0)
    elif name == "replace":
        text, *others = [value if isinstance(value, str) else str(value) for value in values]
        counts = [text.count(old) * len(new) for old, new in permutations(others, 2)]
        _meter.spend(max(counts, default=0))
    elif name == "join":
        items, *others = sorted(values, key=lambda value: isinstance(value, str))
        _meter.spend(_size(items) * sum(map(_meter.weigh, others)))
    elif name in ("format", "braces"):
        _check_format(_PERCENT if name == "format" else _BRACES, values[0], tuple(values[1:]))


def _num_indents(value: Any, depth: int = 1) -> int:
    """Return how often a filter writes the indentation: for each line of a text, and each level of JSON's lines."""
    if isinstance(value, str):
        return value.count("\n") + 1
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return depth
    return 2 * depth + sum(_num_indents(item, depth + 1) for item in value)


def _check_format(pattern: re.Pattern[str], text: Any, values: Any) -> None:
    """Reject large widths of a format, and widths that are values; count what it may write."""
    if not isinstance(text, str):
        return
    specs = pattern.findall(text.replace("{{", ""))
    if any("*" in spec or spec.endswith("{") or _WIDE.search(spec) for spec in specs):
        raise TemplateTooCostly(f"the template formats with a width of {_MAX_WIDTH} or more")
    _meter.spend((_meter.weigh(values) + _MAX_WIDTH) * len(specs))


def _read(value: Any) -> Any:
    """Count a value and return it."""
    if type(value) is str:
        _meter.spend(len(value))
    else:
        _meter.weigh(value)
    return value


def _searched(value: Any) -> Any:
    """Count a value in which another one is searched, and return it. A mapping is not read for it."""
    return value if isinstance(value, dict) else _read(value)


def _sliced(value: Any) -> Any:
    """Count a value of which a slice is copied, and return it."""
    _meter.spend(_size(value))
    return value


@pass_context  # otherwise Jinja computes it when it compiles the template
def _step(_: Context, size: int) -> bool:
    """Count an iteration of a loop with *size* characters of text."""
    _meter.spend(abs(size))
    return True


# Names that a template cannot write as a filter.
_METERS: dict[str, Callable[..., Any]] = {
    "read ": _read,
    "searched ": _searched,
    "sliced ": _sliced,
    "step ": _step,
}


class _Metering(NodeTransformer):
    """Inserts the meter where Jinja compiles a statement or an expression without a call of the environment."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            num_characters = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
            step = _metered(nodes.Const(1 + num_characters), "step ")
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
            if node.test is not None:  # items that it rejects do not reach the body
                node.test = nodes.And(step, node.test, lineno=node.lineno)
        elif isinstance(node, nodes.Concat):
            node.nodes = [_metered(part) for part in node.nodes]
        elif isinstance(node, nodes.Tuple) and node.ctx == "load":
            node.items = [_metered(item) for item in node.items]
        elif isinstance(node, nodes.Pair):
            node.key, node.value = _metered(node.key), _metered(node.value)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node.node = _metered(node.node, "sliced ")
        elif isinstance(node, nodes.Compare):
            _meter_comparison(node)
        return node


def _meter_comparison(node: nodes.Compare) -> None:
    operands = [node.expr, *(operand.expr for operand in node.ops)]
    is_search = any(operand.op in ("in", "notin") for operand in node.ops)
    # A comparison with a constant is as cheap as the constant is short. A search in a text is not.
    if any(isinstance(operand, nodes.Const) for operand in operands) and not is_search:
        return
    what = "searched " if is_search else "read "
    node.expr = _metered(node.expr, what)
    for operand in node.ops:
        operand.expr = _metered(operand.expr, what)


def _metered(node: nodes.Expr, what: str = "read ") -> nodes.Expr:
    if isinstance(node, nodes.Const) and what != "step ":
        return node
    return nodes.Filter(node, what, [], [], None, None, lineno=node.lineno)
