"""A Jinja sandbox with limits of time and memory, for every template that this program renders.

A chat template comes with a model or a recipe, so it may come from anywhere. Jinja's sandbox keeps it from running
code, but not from looping for years or filling the memory. Here each iteration, call and filter checks the time, and
each value that an expression makes is counted with all values in it, so that none is larger than what a rendering may
handle. Operations that make much of little are checked before they run. It needs no signal, thread or process, so it
works in any thread and worker.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date
from itertools import permutations
from string import Formatter
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
"""Characters and items that the operations of one rendering may make together."""
MAX_SOURCE = 2**18
"""Characters of a template."""
_MAX_BITS = 2**14
"""Bits of a number."""
_BATCH = 4096
"""Values that are counted at a time."""
_MAX_WIDTH = 1000
"""Width of a format."""
_MAX_INDENT = 16
"""Width of an indentation, characters of a separator, and digits of a rounding."""

_REMOVED = {"batch", "center", "pprint", "slice", "striptags", "sum", "urlize", "wordcount"}
_REMOVED |= {"wordwrap", "xmlattr"}
"""Filters that make much of little, or take more than linear time. Chat templates do not use them."""
_HIDDEN = {"center", "encode", "expandtabs", "ljust", "maketrans", "rjust", "translate", "zfill"}
"""Methods of texts that do the same."""
# A key with parentheses is rejected, too: Python finds its end in another place, and a search for that end would take
# time that grows with the square of the length.
_WIDE = re.compile(r"%(\([^()]*\))?[-+ #0-9.]*(\*|\d{4})|%\([^()]*\(")
"""A format of the operator % with a width or precision that is large, or is a value."""
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
        """Return the number of values and characters in a value, as often as they occur in it.

        Raises :class:`TemplateTooCostly` if they are more than a rendering may handle.
        """
        if type(value) is str:  # much faster than the loop
            return 1 + len(value)
        total = counted = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            total += 1
            if isinstance(item, Namespace):
                # A namespace answers other names from its own entries.
                item = object.__getattribute__(item, "_Namespace__attrs")
            if isinstance(item, str | bytes | range):
                total += len(item)
            elif isinstance(item, Mapping):
                waiting += [*item.keys(), *item.values()]
            elif isinstance(item, Collection):
                waiting += item
            elif isinstance(item, int) and item.bit_length() > _MAX_BITS:
                raise TemplateTooCostly(f"the template computes with more than {_MAX_BITS} bits")
            counted += 1
            if total + len(waiting) > MAX_SIZE:
                self.spend(total + len(waiting))
            if counted == _BATCH:
                self.spend(counted)
                counted = 0
        self.spend(counted)
        return total

    def made(self, value: Any) -> Any:
        """Count a value that an expression has made, and return it. A container has the characters of others."""
        self.weigh(value)
        self.spend(len(value) if isinstance(value, str) else 0)
        return value

    def written(self, value: Any) -> Any:
        """Count a value that is written or read with all characters in it, and return it."""
        self.spend(self.weigh(value))
        return value


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
            where,
            f"{type(error).__name__}: {str(error)[:500]}",
            "correct the conversation, or the template in the model's chat_template.jinja",
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
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, finalize: Callable[[Any], Any] | None = None, **kwargs: Any):
        # Jinja passes each value that a template writes to finalize.
        counted = _meter.written
        if finalize is not None:
            counted = lambda value: finalize(_meter.written(value))  # noqa: E731
        super().__init__(*args, finalize=counted, **kwargs)
        self.filters = _Filters(_METERS)
        for name in jinja2.filters.FILTERS.keys() - _REMOVED:
            self.filters[name] = jinja2.filters.FILTERS[name]
        tests: dict[str, Any] = self.tests
        for name, test in tests.items():
            tests[name] = _timed(test)
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
            _check_format(left, right)
        elif operator == "*":
            sizes = [
                each if isinstance(each, int) else _meter.weigh(each) for each in (left, right)
            ]
            _meter.spend(sizes[0] * sizes[1])
        return _meter.made(super().call_binop(context, operator, left, right))

    # The names are Jinja's: a template may pass keywords named self or context.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        _meter.spend(1)
        # What a macro or a loop does with its arguments is counted there.
        if not isinstance(__obj, Macro | LoopContext):
            method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
            owner = getattr(method, "__self__", None)
            args = _listed(args)
            owners = (owner,) if isinstance(owner, str | list | tuple) else ()
            _check(getattr(method, "__name__", ""), (*owners, *args), kwargs)
        return _meter.made(super().call(__context, __obj, *args, **kwargs))


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name. A filter that is added is counted."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        has_context = hasattr(function, "jinja_pass_arg")

        # wraps() also copies the attribute that makes Jinja pass the context or environment.
        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            args = _listed(args)
            _check(name, args[1:] if has_context else args, kwargs)
            return _meter.made(function(*args, **kwargs))

        super().__setitem__(name, bounded)


def _timed(test: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a test, so that it checks the time: a filter may call it for each of many values."""

    # wraps() also copies the attribute that makes Jinja pass the context or environment.
    @functools.wraps(test)
    def timed(*args: Any, **kwargs: Any) -> Any:
        _meter.spend(1)
        return test(*args, **kwargs)

    return timed


def _listed(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace iterators by lists: counting an iterator would consume it."""
    return tuple(list(value) if isinstance(value, Iterator) else value for value in values)


def _check(name: str, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Check the time, and count what some filters and methods of texts add to what they read."""
    values = [*given, *options.values()]
    _meter.spend(1)
    if name in ("indent", "round", "tojson"):
        widths = [value if isinstance(value, int) else _meter.weigh(value) for value in values[1:]]
        width = max(map(abs, widths), default=0)
        if width > _MAX_INDENT and not (name == "tojson" and isinstance(values[1], dict)):
            raise TemplateTooCostly(f"the template uses {name} with more than {_MAX_INDENT}")
        _meter.spend(_meter.weigh(values[0]) * width)
    elif name == "replace":
        text, *others = [str(_meter.written(value)) for value in values]
        counts = [text.count(old) * len(new) for old, new in permutations(others, 2)]
        _meter.spend(max(counts, default=0))
    elif name == "join":
        items, *others = sorted(values, key=lambda value: isinstance(value, str))
        number = len(items) if isinstance(items, Collection) else 0
        _meter.spend(number * sum(map(_meter.weigh, others)))
    elif name in ("format", "format_map"):
        _check_format(values[0], tuple(values[1:]))


def _check_format(text: Any, values: Any) -> None:
    """Reject large widths of a format, and widths that are values; count what it may write."""
    if isinstance(text, str):
        is_wide = _WIDE.search(text)
        with suppress(ValueError):  # it is no text for str.format
            for _, _, spec, _ in Formatter().parse(text):
                is_wide = is_wide or re.search(r"\{|\d{4}", spec or "")
        if is_wide:
            raise TemplateTooCostly(f"the template formats with a width of {_MAX_WIDTH} or more")
        num_formats = text.count("%") + text.count("{")
        _meter.spend((_meter.weigh(values) + _MAX_WIDTH) * num_formats)


@pass_context  # otherwise Jinja computes it when it compiles the template
def _step(_: Context, size: int) -> bool:
    """Count an iteration of a loop with *size* characters of text."""
    _meter.spend(abs(size))
    return True


# Names that a template cannot write as a filter.
_METERS: dict[str, Callable[..., Any]] = {
    "made ": _meter.made,
    "written ": _meter.written,
    "compared ": _timed(lambda value: value),
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
        elif isinstance(node, nodes.Compare):
            node.expr = _metered(node.expr, "compared ")
        elif isinstance(node, nodes.Concat):
            node.nodes = [_metered(part, "written ") for part in node.nodes]
        elif (
            isinstance(node, nodes.List | nodes.Dict)
            or (isinstance(node, nodes.Tuple) and node.ctx == "load")
            or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice))
        ):
            return _metered(node)
        return node


def _metered(node: nodes.Expr, what: str = "made ") -> nodes.Expr:
    return nodes.Filter(node, what, [], [], None, None, lineno=node.lineno)
