"""Field settings of a recipe: the name of a field, or a Jinja template of several, such as ``{{ a }}, {{ b }}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from automodel_ckpt.base.bounded_templates import BoundedEnvironment
from automodel_ckpt.errors import RecipeError


def is_template(field: str) -> bool:
    """Whether *field* is a template, and not the name of a field."""
    return "{{" in field or "{%" in field


def names_in(field: str) -> list[str]:
    """List the fields that *field* reads. Raises :class:`RecipeError` for an invalid template."""
    if is_template(field):
        return FieldTemplate(field).names
    return [field]


class FieldTemplate:
    """A template of the fields of a row. A field that is missing or null is written as empty text."""

    def __init__(self, text: str) -> None:
        environment = BoundedEnvironment(keep_trailing_newline=True, finalize=_empty_for_null)
        try:
            undeclared = find_undeclared_variables(environment.parse(text))
            self._template = environment.from_string(text)
        # Jinja compiles to Python, whose compiler raises the last three for a template that is nested too deeply.
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise RecipeError(
                "a field template is not valid Jinja",
                where="dataset",
                value=f"{str(error)[:200]} in {text[:80]!r}",
                hint="write fields as {{ name }} and optional parts as {% if name %}...{% endif %}",
            ) from error
        self.names = sorted(undeclared - environment.globals.keys())

    def write(self, row: Mapping[str, Any], where: Callable[[], str]) -> str:
        """Write the text of a row. Raises :class:`RecipeError` with the location ``where()`` if the template fails."""
        try:
            return self._template.render(row)
        except Exception as error:  # a template can raise anything, for example divide by zero
            value = f"{type(error).__name__}: {error}"
            hint = "correct this sample, or the template"
            raise RecipeError(
                "a field template fails on a sample", where=where(), value=value, hint=hint
            ) from error


def _empty_for_null(value: Any) -> Any:
    return "" if value is None else value
