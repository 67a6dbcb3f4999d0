"""Questions and answers in the columns of a table with images or audio, and presets for data sets of the Hub.

The columns of the presets are from the data sets' pages on the Hub. Their questions are the ones with which NeMo
AutoModel's recipes train on them. Source of the token sequence of an object: G. Kim et al., "OCR-free Document
Understanding Transformer" (Donut), 2022, with which the data set CORD v2 was published.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.base.units import counted
from automodel_ckpt.data.collate import Item, require_choice
from automodel_ckpt.data.conversations.messages import (
    Object,
    Turns,
    UnusableSample,
    at_row,
    parsed,
)
from automodel_ckpt.data.media.image_conversations import RowContent
from automodel_ckpt.data.media.media_files import duration_of
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.samples import cached
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)


def _require_one_question(prompt: str | None, prompt_field: str | None) -> None:
    if prompt is not None and prompt_field is not None:
        raise RecipeError(
            "the question is given as a text and as a column",
            where="dataset.prompt, dataset.prompt_field",
            value=f"{prompt!r}, {prompt_field!r}",
            hint="",
        )


def _conversation(question: list[Object], answer: str, system: str | None = None) -> Turns:
    messages: Turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    if system is not None and system.strip():
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    return messages


PRESETS: dict[str, dict[str, str]] = {
    "medpix": {
        "path": "mmoukouba/MedPix-VQA",
        "image_field": "image_id",
        "prompt_field": "question",
    },
    "cord_v2": {
        "path": "naver-clova-ix/cord-v2",
        "answer_field": "ground_truth",
        "answer_format": "json_tokens",
    },
    "rdr": {"path": "quintend/rdr-items", "answer_field": "text"},
    "shopify": {
        "path": "Shopify/product-catalogue",
        "image_field": "product_image",
        "prompt": "What product category does this item belong to?",
        "answer_field": "ground_truth_category",
    },
}
"""Name of a preset -> the columns of its data set."""


@dataclass(frozen=True)
class AnswerColumns:
    """Where the rows of a table have the image, the question and the answer."""

    path: str | list[str] = ""
    image_field: str = "image"
    prompt: str = "Describe this image."
    """The question of every row, unless it is in *prompt_field*."""
    prompt_field: str | None = None
    answer_field: str = "answer"
    answer_format: str = "text"

    @classmethod
    def of(cls, preset: str | None, given: Mapping[str, Any]) -> AnswerColumns:
        """Make the columns of a *preset*, or the defaults, with the values *given* that are not None.

        Raises :class:`RecipeError` for an unknown preset or format, if there is no path, and if both a question and a
        column for it are given.
        """
        if preset is not None:
            require_choice("preset", preset, list(PRESETS))
        _require_one_question(given["prompt"], given["prompt_field"])
        explicit = {name: value for name, value in given.items() if value is not None}
        values = dict(PRESETS.get(preset or "", {}))
        if "prompt" in explicit:
            values.pop("prompt_field", None)
        columns = cls(**values | explicit)
        require_choice("answer_format", columns.answer_format, ("text", "json_tokens"))
        if not columns.path:
            raise RecipeError(
                "the data set has no path and no preset",
                where="dataset.path, dataset.preset",
                value=", ".join(PRESETS),
                hint="",
            )
        return columns

    @property
    def fields(self) -> list[str]:
        """The columns that the rows must have."""
        question = [] if self.prompt_field is None else [self.prompt_field]
        return [self.image_field, self.answer_field, *question]

    def content_of(self, row: Item) -> RowContent:
        """Convert a row to a conversation of two messages. Raises :class:`UnusableSample` if something is missing."""
        images = row.get(self.image_field)
        if images is None or images == []:
            raise UnusableSample("a row has no image", f"column {self.image_field}: {images}")
        if not isinstance(images, list):
            images = [images]
        prompt = self.prompt if self.prompt_field is None else _text(row, self.prompt_field)
        if self.answer_format == "json_tokens":
            answer = _tokens_of_answer(row.get(self.answer_field), self.answer_field)
        else:
            answer = _text(row, self.answer_field)
        question = [*({"type": "image"} for _ in images), {"type": "text", "text": prompt}]
        return RowContent(_conversation(question, answer), images)


def json_tokens(value: Any) -> str:
    """Write a JSON value as Donut's token sequence.

    An object is ``<s_key>value</s_key>`` for each key, the keys in descending order; the items of a list are separated
    by ``<sep/>``; the object ``{"text_sequence": text}`` is its text; anything else is its text.
    """
    if isinstance(value, list):
        return "<sep/>".join(json_tokens(item) for item in value)
    if not isinstance(value, dict):
        return str(value)
    if value.keys() == {"text_sequence"}:
        return str(value["text_sequence"])
    return "".join(
        f"<s_{key}>{json_tokens(value[key])}</s_{key}>"
        for key in sorted(value, key=str, reverse=True)
    )


def _tokens_of_answer(value: Any, field: str) -> str:
    """Write an answer, an object or its JSON text, as a token sequence.

    CORD's annotations are in ``gt_parse``, or in the list ``gt_parses``, of which the first is used. Raises
    :class:`UnusableSample` if it is not an object.
    """
    # An object may be nested too deeply for Python's stack.
    with contextlib.suppress(RecursionError):
        found = parsed(value)
        if isinstance(found, dict) and isinstance(found.get("gt_parses"), list):
            found = next(iter(found["gt_parses"]), None)
        elif isinstance(found, dict) and "gt_parse" in found:
            found = found["gt_parse"]
        if isinstance(found, dict) and found:
            return json_tokens(found)
    raise UnusableSample(
        "an answer is not a JSON object",
        f"column {field}: {value}",
        "correct this row, or set dataset.answer_format text",
    )


def _text(row: Item, field: str) -> str:
    """Return the text of a column. Raises :class:`UnusableSample` if there is none."""
    value = row.get(field)
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UnusableSample(
        "a row has no text in a column that a question or an answer is read from",
        f"column {field}: {value}",
        "correct or remove this row, or name another column (dataset.prompt_field, dataset.answer_field)",
    )


_TAG = re.compile(r"<[^>]*>")
_NO_WORD = re.compile(r"[^\w\s']|_")
_FORMAT = 1
"""Part of the cache's keys. Increase it when the durations of the same data change."""
_BLOCK = 100
"""Number of rows that are read at a time."""


@dataclass(frozen=True)
class TranscriptColumns:
    """Where the rows of a table have the audio, its transcript and the question."""

    audio_field: str = "audio"
    text_field: str = "text"
    prompt: str | None = None
    prompt_field: str | None = None
    prompt_first: bool = True
    system_prompt: str | None = None
    normalize: str = "none"

    def __post_init__(self) -> None:
        require_choice("normalize", self.normalize, ("none", "upper_words"))
        _require_one_question(self.prompt, self.prompt_field)

    @property
    def fields(self) -> list[str]:
        """The columns that the rows must have."""
        question = [] if self.prompt_field is None else [self.prompt_field]
        return [self.audio_field, self.text_field, *question]

    def transcript(self, value: Any) -> str:
        """Return the text of a transcript; empty if there is none."""
        text = value if isinstance(value, str) else ""
        return normalized(text) if self.normalize == "upper_words" else text

    def content_of(self, row: Item) -> RowContent:
        """Convert a row to a conversation. Raises :class:`UnusableSample` if something is missing."""
        audio = row.get(self.audio_field)
        if audio is None:
            raise UnusableSample("a row has no audio", f"column {self.audio_field}: null")
        answer = self.transcript(row.get(self.text_field))
        if not answer.strip():
            raise UnusableSample(
                "a row has no transcript",
                f"column {self.text_field}: {row.get(self.text_field)}",
                "remove this row, name another column, or set dataset.skip_empty true",
            )
        prompt = self.prompt if self.prompt_field is None else row.get(self.prompt_field)
        question: list[Object] = [{"type": "audio"}]
        if isinstance(prompt, str) and prompt.strip():
            question.insert(0 if self.prompt_first else 1, {"type": "text", "text": prompt})
        return RowContent(_conversation(question, answer, self.system_prompt), [], None, [audio])


def normalized(text: str) -> str:
    """Return the words of a transcript in upper case, without punctuation, except apostrophes, and without tags."""
    plain = _TAG.sub(" ", text.replace("’", "'")).upper()
    return " ".join(_NO_WORD.sub(" ", plain).split())


def usable_rows(
    source: Source,
    columns: TranscriptColumns,
    skip_empty: bool,
    min_seconds: float | None,
    max_seconds: float | None,
) -> list[int] | None:
    """List the rows with a transcript and an audio of an allowed length. Returns None when all rows are used.

    Raises :class:`RecipeError` if no row is left.
    """
    is_used = np.ones(source.num_rows, np.bool_)
    if skip_empty:
        texts = source.values(columns.text_field)
        is_used &= np.array([bool(columns.transcript(text).strip()) for text in texts], np.bool_)
    if min_seconds is not None or max_seconds is not None:
        seconds = _durations(source, columns.audio_field)
        longest = np.inf if max_seconds is None else max_seconds
        is_used &= (seconds >= (min_seconds or 0.0)) & (seconds <= longest)
        log.info("%s: %.2f hours of audio", source.path, float(seconds[is_used].sum()) / 3600)
    numbers: list[int] = np.flatnonzero(is_used).tolist()
    if not numbers:
        raise RecipeError(
            "no row is left to train on",
            where="dataset.text_field, dataset.min_seconds, dataset.max_seconds",
            value=counted(len(is_used), "row"),
            hint="",
        )
    if len(numbers) == len(is_used):
        return None
    log.info(
        "%s: %d of %s left out: without a transcript, too short or too long",
        *(source.path, len(is_used) - len(numbers), counted(len(is_used), "row")),
    )
    return numbers


def _durations(source: Source, field: str) -> Any:
    """The seconds of the audio of each row, by their headers; cached. Raises :class:`RecipeError` with the row."""

    def build(directory: Path) -> None:
        num_rows = source.num_rows
        log.info("reading the length of the audio of %s", counted(num_rows, "row"))
        seconds = np.zeros(num_rows)
        for start in range(0, num_rows, _BLOCK):
            [values] = source.read_range([field], start, min(start + _BLOCK, num_rows))
            for number, value in enumerate(values, start):
                with at_row(source, number):
                    seconds[number] = duration_of(value, source.folder)
        np.save(directory / "seconds.npy", seconds)

    key = (_FORMAT, source.fingerprint(), str(source.folder.absolute()), field)
    # np.load rejects pickled objects by default.
    return np.load(cached("audio_seconds", key, build) / "seconds.npy")
