"""Rows of preference data in one form: a prompt, and a preferred and a rejected answer, as texts or as messages.

Data sets write them in many ways, all of which are read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.data.conversations.chat_renderer import common_length
from automodel_ckpt.data.rows.rows import (
    Columns,
    Rows,
    is_template,
    names_in,
)
from automodel_ckpt.data.samples.labels import finite_number
from automodel_ckpt.errors import RecipeError

PROMPT, CHOSEN, REJECTED, SYSTEM = "prompt", "chosen", "rejected", "system"
"""The fields of the rows in one form; also the default names in the data."""
TOOLS = "tools"


class ColumnRows(Rows):
    """A table of *columns*. Its rows have the locations of the rows of *source*."""

    def __init__(self, source: Rows, columns: Mapping[str, list[Any]]) -> None:
        self.path = source.path
        self.source = source
        self.data = columns

    @property
    def num_rows(self) -> int:
        return self.source.num_rows

    @property
    def fields(self) -> Sequence[str]:
        return list(self.data)

    def read(self, fields: Sequence[str]) -> Columns:
        return [self.data[field] for field in fields]

    def place(self, row: int) -> str:
        return self.source.place(row)


@dataclass(frozen=True)
class PreferenceFields:
    """The names of the fields in the data, or templates of several fields.

    *system* is None when there are no system messages. The prompt may be missing in the data if it has its default
    name, and the margin if it has any.
    """

    prompt: str = PROMPT
    chosen: str = CHOSEN
    rejected: str = REJECTED
    system: str | None = None
    margin: str = "margin"

    @property
    def names(self) -> list[str]:
        """The fields of the data that are used."""
        names: list[str] = []
        for field in (self.prompt, self.chosen, self.rejected, self.system, self.margin, TOOLS):
            names += [] if field is None else names_in(field)
        return names


def in_one_form(rows: Rows, fields: PreferenceFields) -> ColumnRows:
    """Return *rows* with the fields ``prompt``, ``chosen`` and ``rejected``; ``system`` and ``tools`` if there are any.

    Prompts and answers are texts in all rows, or lists of messages in all rows. A prompt that the data has only as the
    common beginning of both answers is removed from them. Raises :class:`RecipeError` with the location of a row with
    values that are neither text nor messages.
    """
    answers = [fields.chosen, fields.rejected]
    has_prompt = fields.prompt != PROMPT or rows.has_field(PROMPT)
    given = [fields.prompt, *answers] if has_prompt else answers
    # ShareGPT's preferences are single messages.
    are_messages = rows.contain_messages(given)
    for field in answers:
        if not are_messages and not is_template(field):
            [values] = rows.columns([field])
            are_messages = any(isinstance(value, Mapping) for value in values)
    columns = (_message_columns if are_messages else _text_columns)(rows, fields, has_prompt)
    if rows.has_field(TOOLS):
        columns[TOOLS] = rows.values(TOOLS)
    return ColumnRows(rows, columns)


# ------------------------------------------------------------------------------------- texts


def _text_columns(rows: Rows, fields: PreferenceFields, has_prompt: bool) -> dict[str, list[Any]]:
    used = {CHOSEN: fields.chosen, REJECTED: fields.rejected}
    if has_prompt:
        used[PROMPT] = fields.prompt
    if fields.system is not None:
        used[SYSTEM] = fields.system
    columns: dict[str, list[Any]] = dict(zip(used, rows.texts(list(used.values())), strict=True))
    if not has_prompt:
        columns[PROMPT] = []
        for row in range(rows.num_rows):
            prompt = common_text(columns[CHOSEN][row], columns[REJECTED][row])
            columns[PROMPT].append(prompt)
            for name in (CHOSEN, REJECTED):
                columns[name][row] = columns[name][row].removeprefix(prompt)
    return columns


def common_text(first: str, second: str) -> str:
    """Return the common beginning of two texts up to their last common space or line break, without this one."""
    length = common_length(first, second)
    # A word with the same beginning is part of the answers.
    while length > 0 and not first[length - 1].isspace():
        length -= 1
    return first[: max(length - 1, 0)]


# ------------------------------------------------------------------------------------- messages


def _message_columns(
    rows: Rows, fields: PreferenceFields, has_prompt: bool
) -> dict[str, list[Any]]:
    chosen = _values(rows, fields.chosen)
    rejected = _values(rows, fields.rejected)
    prompts = _values(rows, fields.prompt) if has_prompt else [[]] * rows.num_rows
    systems = [""] * rows.num_rows
    if fields.system is not None:
        [systems] = rows.texts([fields.system])
    columns: dict[str, list[Any]] = {PROMPT: [], CHOSEN: [], REJECTED: []}
    for row in range(rows.num_rows):
        first = _messages(rows, row, fields.chosen, chosen[row], "assistant")
        second = _messages(rows, row, fields.rejected, rejected[row], "assistant")
        # The messages that both begin with; at least one message of each is an answer.
        num_common = common_length(first[:-1], second[:-1])
        prompt = first[:num_common]
        # A text is the question alone, which messages that both answers begin with contain.
        if not (num_common and isinstance(prompts[row], str)):
            given = _messages(rows, row, fields.prompt, prompts[row], "user")
            prompt = prompt if prompt[: len(given)] == given else given + prompt
        if systems[row]:
            prompt = [{"role": "system", "content": systems[row]}, *prompt]
        columns[PROMPT].append(prompt)
        columns[CHOSEN].append(first[num_common:])
        columns[REJECTED].append(second[num_common:])
    return columns


def _values(rows: Rows, field: str) -> list[Any]:
    """The values of a field, or the texts of a template of fields."""
    [values] = rows.texts([field]) if is_template(field) else rows.columns([field])
    return list(values)


def _messages(rows: Rows, row: int, field: str, value: Any, role: str) -> list[Any]:
    """Return *value* as a list of messages; a text is the message of *role*."""
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping):
        return [dict(value)]
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    reason = "missing" if value is None else "neither text nor messages"
    raise RecipeError(
        f"field {field} of a sample is {reason}",
        where=rows.place(row),
        value=value,
        hint="correct or remove this sample",
    )


def margins_of(rows: Rows, field: str) -> list[float]:
    """The margin of each row, NaN if it has none. Raises :class:`RecipeError` for a value that is not a number."""
    if not rows.has_field(field):
        return [math.nan] * rows.num_rows
    margins = []
    for row, value in enumerate(rows.values(field)):
        if value is None:
            margins.append(math.nan)
            continue
        number = finite_number(value)
        if number is None:
            raise RecipeError(
                "the margin of a preference is not a finite number",
                where=rows.place(row),
                value=value,
                hint=f"correct field {field} of this sample, or name another field in dataset.margin_field",
            )
        margins.append(number)
    return margins
