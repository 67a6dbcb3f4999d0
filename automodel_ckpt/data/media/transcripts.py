"""Audio and its transcripts in the columns of a table, for speech recognition."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from automodel_ckpt.base.units import counted
from automodel_ckpt.data.conversations.messages import UnusableSample, at_row
from automodel_ckpt.data.media.audio_files import duration_of
from automodel_ckpt.data.media.image_conversations import RowContent
from automodel_ckpt.data.rows.arguments import require_choice
from automodel_ckpt.data.rows.cache import cached
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

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
        if self.prompt is not None and self.prompt_field is not None:
            raise RecipeError(
                "the question is given as a text and as a column",
                where="dataset.prompt, dataset.prompt_field",
                value=f"{self.prompt!r}, {self.prompt_field!r}",
                hint="remove one of them",
            )

    @property
    def fields(self) -> list[str]:
        """The columns that the rows must have."""
        fields = [self.audio_field, self.text_field]
        if self.prompt_field is not None:
            fields.append(self.prompt_field)
        return fields

    def transcript(self, value: Any) -> str:
        """Return the text of a transcript; empty if there is none."""
        text = value if isinstance(value, str) else ""
        return normalized(text) if self.normalize == "upper_words" else text

    def content_of(self, row: Mapping[str, Any]) -> RowContent:
        """Convert a row to a conversation. Raises :class:`UnusableSample` if something is missing."""
        audio = row.get(self.audio_field)
        if audio is None:
            raise UnusableSample(
                "a row has no audio", f"column {self.audio_field}: null", "remove this row"
            )
        answer = self.transcript(row.get(self.text_field))
        if not answer.strip():
            raise UnusableSample(
                "a row has no transcript",
                f"column {self.text_field}: {str(row.get(self.text_field))[:80]}",
                "remove this row, name another column, or set dataset.skip_empty true",
            )
        prompt = self.prompt if self.prompt_field is None else row.get(self.prompt_field)
        question: list[dict[str, str]] = [{"type": "audio"}]
        if isinstance(prompt, str) and prompt.strip():
            question.insert(0 if self.prompt_first else 1, {"type": "text", "text": prompt})
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        if self.system_prompt is not None and self.system_prompt.strip():
            system = [{"type": "text", "text": self.system_prompt}]
            messages.insert(0, {"role": "system", "content": system})
        return RowContent(messages, [], None, [audio])


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
    """List the rows with a transcript and an audio of an allowed length; None if all rows are used.

    Raises :class:`RecipeError` if no row is left.
    """
    num_rows = source.num_rows
    is_used = np.ones(num_rows, dtype=np.bool_)
    if skip_empty:
        [texts] = source.read([columns.text_field])
        is_used = np.array([bool(columns.transcript(text).strip()) for text in texts], np.bool_)
    num_empty = num_rows - int(is_used.sum())
    reasons = [(num_empty, "without a transcript")]
    if min_seconds is not None or max_seconds is not None:
        seconds = _durations(source, columns.audio_field)
        is_short = is_used & (seconds < (min_seconds or 0.0))
        is_long = is_used & (seconds > (np.inf if max_seconds is None else max_seconds))
        is_used &= ~(is_short | is_long)
        reasons.append((int(is_short.sum()), f"shorter than {min_seconds} s"))
        reasons.append((int(is_long.sum()), f"longer than {max_seconds} s"))
        hours = float(seconds[is_used].sum()) / 3600
        log.info("%s: %.2f hours of audio", source.path, hours)
    if not is_used.any():
        raise RecipeError(
            "no row is left to train on",
            where="dataset",
            value=", ".join(f"{number} {why}" for number, why in reasons if number) or "0 rows",
            hint="check dataset.text_field, min_seconds and max_seconds",
        )
    if is_used.all():
        return None
    left_out = ", ".join(f"{number} {why}" for number, why in reasons if number)
    log.info("%s: %s left out: %s", source.path, counted(int((~is_used).sum()), "row"), left_out)
    numbers: list[int] = np.flatnonzero(is_used).tolist()
    return numbers


def _durations(source: Source, field: str) -> Any:
    """The seconds of the audio of each row, by their headers; cached. Raises :class:`RecipeError` with the row."""

    def build(directory: Path) -> None:
        log.info("reading the length of the audio of %s", counted(source.num_rows, "row"))
        np.save(directory / "seconds.npy", _read_durations(source, field))

    key = (_FORMAT, source.fingerprint(), str(source.folder.absolute()), field)
    # np.load rejects pickled objects by default.
    return np.load(cached("audio_seconds", key, build) / "seconds.npy")


def _read_durations(source: Source, field: str) -> Any:
    seconds = np.zeros(source.num_rows)
    for start in range(0, source.num_rows, _BLOCK):
        [values] = source.read_range([field], start, min(start + _BLOCK, source.num_rows))
        for number, value in enumerate(values, start):
            with at_row(source, number):
                seconds[number] = duration_of(value, source.folder)
    return seconds
