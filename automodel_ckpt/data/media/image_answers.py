"""Questions about images in the columns of a table, and presets for data sets of the Hub.

The columns of the presets are those of the data sets' pages on the Hub, and their questions those with which NeMo
AutoModel's recipes train on them. Source of the token sequence of an object: G. Kim et al., "OCR-free Document
Understanding Transformer" (Donut), 2022, with which the data set CORD v2 was published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from automodel_ckpt.data.conversations.messages import UnusableSample, parsed
from automodel_ckpt.data.media.image_conversations import RowContent
from automodel_ckpt.data.rows.arguments import require_choice
from automodel_ckpt.errors import RecipeError

_MAX_DEPTH = 100
"""Levels of an object that becomes a token sequence. Deeper ones would exhaust the stack."""


@dataclass(frozen=True)
class AnswerColumns:
    """Where the rows of a table have the image, the question and the answer."""

    path: str | list[str] | None = None
    image_field: str = "image"
    prompt: str | None = None
    """The question of every row; None: the question is in *prompt_field*."""
    prompt_field: str | None = None
    answer_field: str = "answer"
    answer_format: str = "text"

    @classmethod
    def of(cls, preset: str | None, given: Mapping[str, Any]) -> AnswerColumns:
        """Make the columns of a *preset*, or the defaults, with those of the values *given* that are not None.

        Raises :class:`RecipeError` for an unknown preset or format, if there is no path, and if both a question and a
        column for it are given.
        """
        if preset is not None:
            require_choice("preset", preset, list(PRESETS))
        base = cls() if preset is None else PRESETS[preset]
        explicit = {name: value for name, value in given.items() if value is not None}
        if {"prompt", "prompt_field"} <= explicit.keys():
            raise RecipeError(
                "the question is given as a text and as a column",
                where="dataset.prompt, dataset.prompt_field",
                value=f"{explicit['prompt']!r}, {explicit['prompt_field']!r}",
                hint="remove one of them",
            )
        if "prompt_field" in explicit:
            base = replace(base, prompt=None)
        elif "prompt" in explicit:
            base = replace(base, prompt_field=None)
        columns = replace(base, **explicit)
        require_choice("answer_format", columns.answer_format, ("text", "json_tokens"))
        if columns.path is None:
            raise RecipeError(
                "the data set has no path",
                where="dataset.path",
                value=None,
                hint=f"set dataset.path, or dataset.preset to one of: {', '.join(PRESETS)}",
            )
        if columns.prompt is None and columns.prompt_field is None:
            columns = replace(columns, prompt="Describe this image.")
        return columns

    @property
    def fields(self) -> list[str]:
        """The columns that the rows must have."""
        fields = [self.image_field, self.answer_field]
        if self.prompt_field is not None:
            fields.append(self.prompt_field)
        return fields

    def content_of(self, row: Mapping[str, Any]) -> RowContent:
        """Convert a row to a conversation of two messages. Raises :class:`UnusableSample` if something is missing."""
        images = row.get(self.image_field)
        if images is None or images == []:
            raise UnusableSample(
                "a row has no image", f"column {self.image_field}: {images}", "remove this row"
            )
        if not isinstance(images, list):
            images = [images]
        prompt = self.prompt
        if self.prompt_field is not None:
            prompt = _text(row, self.prompt_field)
        if self.answer_format == "json_tokens":
            answer = _tokens_of_answer(row.get(self.answer_field), self.answer_field)
        else:
            answer = _text(row, self.answer_field)
        question = [{"type": "image"} for _ in images]
        question.append({"type": "text", "text": str(prompt)})
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        return RowContent(messages, images)


PRESETS = {
    "medpix": AnswerColumns("mmoukouba/MedPix-VQA", "image_id", None, "question", "answer"),
    "cord_v2": AnswerColumns(
        "naver-clova-ix/cord-v2",
        "image",
        "Describe this image.",
        None,
        "ground_truth",
        "json_tokens",
    ),
    "rdr": AnswerColumns("quintend/rdr-items", "image", "Describe this image.", None, "text"),
    "shopify": AnswerColumns(
        "Shopify/product-catalogue",
        "product_image",
        "What product category does this item belong to?",
        None,
        "ground_truth_category",
    ),
}
"""Name of a preset -> the columns of its data set."""


def json_tokens(value: Any) -> str:
    """Write a JSON value as Donut's token sequence.

    An object is ``<s_key>value</s_key>`` for each key, the keys in descending order; the items of a list are separated
    by ``<sep/>``; the object ``{"text_sequence": text}`` is its text; anything else is its text. Raises
    :class:`UnusableSample` for an object that is nested too deeply.
    """
    return _json_tokens(value, 0)


def _json_tokens(value: Any, depth: int) -> str:
    if depth > _MAX_DEPTH:
        raise UnusableSample(
            "an answer is nested too deeply", f"more than {_MAX_DEPTH} levels", "remove this row"
        )
    if isinstance(value, list):
        return "<sep/>".join(_json_tokens(item, depth + 1) for item in value)
    if not isinstance(value, dict):
        return str(value)
    if value.keys() == {"text_sequence"}:
        return str(value["text_sequence"])
    written = []
    for key in sorted(value, key=str, reverse=True):
        inner = _json_tokens(value[key], depth + 1)
        written.append(f"<s_{key}>{inner}</s_{key}>")
    return "".join(written)


def _tokens_of_answer(value: Any, field: str) -> str:
    """Write an answer, an object or its JSON text, as a token sequence.

    CORD's annotations are in ``gt_parse``, or in the list ``gt_parses``, of which the first is used. Raises
    :class:`UnusableSample` if it is not an object.
    """
    try:
        found = parsed(value)
    except RecursionError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("gt_parses"), list):
        found = next(iter(found["gt_parses"]), None)
    elif isinstance(found, dict) and "gt_parse" in found:
        found = found["gt_parse"]
    if not isinstance(found, dict) or not found:
        raise UnusableSample(
            "an answer is not a JSON object",
            f"column {field}: {json.dumps(value, default=str)[:80]}",
            "correct this row, or set dataset.answer_format text",
        )
    return json_tokens(found)


def _text(row: Mapping[str, Any], field: str) -> str:
    """Return the text of a column. Raises :class:`UnusableSample` if there is none."""
    value = row.get(field)
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UnusableSample(
        "a row has no text in a column that a question or an answer is read from",
        f"column {field}: {str(value)[:80]}",
        "correct or remove this row, or name another column (dataset.prompt_field, dataset.answer_field)",
    )
