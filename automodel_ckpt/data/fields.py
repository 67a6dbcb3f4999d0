"""What a recipe calls a field: its name, or a Jinja template that writes a text of several, as ``{{ a }}, {{ b }}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from automodel_ckpt.data.templates import BoundedEnvironment
from automodel_ckpt.errors import RecipeError


def is_template(field: str) -> bool:
    """Whether *field* writes a text, rather than naming a field."""
    return "{{" in field or "{%" in field


def names_in(field: str) -> list[str]:
    """The fields that *field* needs; :class:`RecipeError` for a template that is none."""
    return FieldTemplate(field).names if is_template(field) else [field]


class FieldTemplate:
    """A template over the fields of a row; what is missing in a row, or null, is written as nothing."""

    def __init__(self, text: str) -> None:
        environment = BoundedEnvironment(keep_trailing_newline=True, finalize=_or_nothing)
        try:
            undeclared = find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
        # Python itself refuses what is nested too deeply.
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            hint = "write fields as {{ name }} and optional parts as {% if name %}...{% endif %}"
            what = "a field template is not valid Jinja"
            raise RecipeError(
                what, where="dataset", value=f"{str(error)[:200]} in {text[:80]!r}", hint=hint
            ) from error
        self.names = sorted(undeclared - environment.globals.keys())

    def write(self, row: Mapping[str, Any], where: Callable[[], str]) -> str:
        """The text for a row; :class:`RecipeError` names *where* it stands."""
        try:
            return self._template.render(row)
        except Exception as error:  # a template computes: it may divide by zero
            value = f"{type(error).__name__}: {error}"
            hint = "correct this sample, or the template"
            raise RecipeError(
                "a field template fails on a sample", where=where(), value=value, hint=hint
            ) from error


def _or_nothing(value: Any) -> Any:
    return "" if value is None else value
