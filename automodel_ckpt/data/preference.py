"""Preference data: pairs of a preferred and a rejected answer to the same prompt, and their micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.batches.micro_batches import Collate
from automodel_ckpt.data.chat import PairEncoder
from automodel_ckpt.data.collate import Batch, Item, RowOptions, Sample, require_keys
from automodel_ckpt.data.conversations.chat_renderer import common_length
from automodel_ckpt.data.rows.files import NO_STREAM
from automodel_ckpt.data.rows.rows import (
    ColumnRows,
    Rows,
    is_template,
    names_in,
)
from automodel_ckpt.data.samples.labels import finite_number
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import (
    Samples,
    TokenizedDataset,
    TokenizedSample,
    Truncation,
)
from automodel_ckpt.errors import RecipeError

PROMPT, CHOSEN, REJECTED, SYSTEM = "prompt", "chosen", "rejected", "system"
"""The fields of the rows in one form; also the default names in the data."""
TOOLS = "tools"


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
    has_prompt = fields.prompt != PROMPT or PROMPT in rows.fields
    given = [fields.prompt, *answers] if has_prompt else answers
    # ShareGPT's preferences are single messages.
    are_messages = rows.contain_messages(given)
    for field in answers:
        if not are_messages and not is_template(field):
            [values] = rows.columns([field])
            are_messages = any(isinstance(value, Mapping) for value in values)
    columns = (_message_columns if are_messages else _text_columns)(rows, fields, has_prompt)
    if TOOLS in rows.fields:
        columns[TOOLS] = rows.values(TOOLS)
    return ColumnRows(rows.path, columns, list(map(rows.place, range(rows.num_rows))))


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
    raise rows.no_text(row, field, value, "neither text nor messages")


def margins_of(rows: Rows, field: str) -> list[float]:
    """The margin of each row, NaN if it has none. Raises :class:`RecipeError` for a value that is not a number."""
    if field not in rows.fields:
        return [math.nan] * rows.num_rows
    margins = []
    for row, value in enumerate(rows.values(field)):
        number = math.nan if value is None else finite_number(value)
        if number is None:
            what = "the margin of a preference is not a finite number"
            raise rows.unusable(row, what, f"{value!r} in dataset.margin_field {field}")
        margins.append(number)
    return margins


MARGIN = "margin"
REFERENCE_CHOSEN, REFERENCE_REJECTED = "reference_chosen", "reference_rejected"
NUMBERS = (MARGIN, REFERENCE_CHOSEN, REFERENCE_REJECTED)
"""Numbers of pairs, in samples and in micro-batches: their margins, and log-probabilities under a reference."""


def pairs(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int | None = 2048,
    prompt_field: str = "prompt",
    chosen_field: str = "chosen",
    rejected_field: str = "rejected",
    margin_field: str = "margin",
    system_field: str | None = None,
    as_chat: Literal["auto"] | bool = False,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    truncation: Literal["error", "right", "skip"] = "error",
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make one pair per row: the prompt with its preferred answer, and the prompt with its rejected answer.

    Only the answers and their end tokens have labels. Prompt and answers are texts, which are concatenated unchanged,
    or Jinja templates of fields, such as ``"{{ question }}\\nAnswer: "``. They may also be lists of messages, or single
    messages, of ``{"role", "content", ...}`` or ShareGPT's ``{"from", "value"}``; if one of them is, a text is a
    message of the user (the prompt) or of the assistant (an answer). Messages are rendered by *chat_template* with
    *template_kwargs* (:func:`~automodel_ckpt.data.chat.messages`); a field ``tools`` is passed to the template. With
    *as_chat*, texts are rendered so too, after the text of *system_field* if it is set; with ``auto``, only if the
    tokenizer has a chat template.

    Data without the field ``prompt`` has whole conversations in both fields: the messages that both begin with, or the
    words of a text, are the prompt. Rows with two equal answers are skipped.

    Raises :class:`RecipeError` with the location of a row with fields that are neither text nor messages, that the
    template cannot render, or with a margin that is not a number.
    """
    fields = PreferenceFields(
        prompt_field, chosen_field, rejected_field, system_field, margin_field
    )

    def encoder_of(answer: str) -> PairEncoder:
        return PairEncoder(
            tokenizer,
            PROMPT,
            answer,
            SYSTEM if system_field is not None else None,
            as_chat,
            chat_template,
            dict(template_kwargs or {}),
            "completion",
        )

    chosen_encoder, rejected_encoder = encoder_of(CHOSEN), encoder_of(REJECTED)

    def encode(rows: Rows) -> Samples:
        table = in_one_form(rows, fields)
        margins = margins_of(rows, margin_field)
        answers = (each.encode(table) for each in (chosen_encoder, rejected_encoder))
        samples = []
        for chosen, rejected, margin in zip(*answers, margins, strict=True):
            if chosen.tokens == rejected.tokens:
                # The row is skipped.
                chosen = rejected = TokenizedSample([], [])
            samples += [chosen._replace(number=margin), rejected._replace(number=margin)]
        return samples

    return samples_of(
        path,
        tokenizer,
        encode,
        Truncation.of(truncation, seq_length),
        fields=fields.names,
        key=("preference-pairs", repr(fields), *chosen_encoder.key),
        **options,
        kind=PreferenceDataset,
    )


class PreferenceDataset(TokenizedDataset):
    """A map-style data set of pairs, ``{"chosen": sample, "rejected": sample}``, with ``"margin"`` if the data has it.

    Tokenized sample 2 i is the preferred one of pair i, and 2 i + 1 the rejected one.
    """

    # A promise is not inherited: a subclass could draw random numbers.
    draws_nothing = True
    group_size: ClassVar[int] = 2
    noun: ClassVar[str] = "pair"

    @staticmethod
    def item(samples: Sequence[Sample], number: float, limit: int | None) -> Any:
        pair: dict[str, Any] = dict(zip((CHOSEN, REJECTED), samples, strict=True))
        if not math.isnan(number):
            pair[MARGIN] = float(number)
        return pair


@dataclass(frozen=True)
class PreferenceCollator:
    """Makes a micro-batch of pairs: row 2 i of its tensors is the preferred answer of pair i, 2 i + 1 the rejected one.

    *collate_fn* makes the tensors of the rows. A pair is ``{"chosen": sample, "rejected": sample}``; numbers next
    to them, such as ``margin``, become float32 tensors [pairs] under the same names, with NaN for pairs that lack them.
    Raises :class:`RecipeError` for samples that are not pairs.
    """

    # A promise about this class. The promise of collate_fn is examined as well.
    draws_nothing = True

    collate_fn: Collate

    def __call__(self, pairs: Sequence[Item]) -> Batch:
        for pair in pairs:
            require_keys(pair, CHOSEN, REJECTED)
        rows = [pair[name] for pair in pairs for name in (CHOSEN, REJECTED)]
        batch = dict(self.collate_fn(rows))
        for name in dict.fromkeys(name for pair in pairs for name in pair):
            if name not in (CHOSEN, REJECTED):
                numbers = [pair.get(name, math.nan) for pair in pairs]
                batch[name] = torch.tensor(numbers, dtype=torch.float32)
        return batch


def require_pairs(dataset: Any) -> None:
    """Raise :class:`RecipeError` if the first sample of a map-style data set is not a pair; streams are not read."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset):
        require_keys(dataset[0], CHOSEN, REJECTED)


SCORES = (REFERENCE_CHOSEN, REFERENCE_REJECTED)
"""The names of both log-probabilities in samples and micro-batches."""
Scores = npt.NDArray[np.float32]


class ScoredPairs:
    """The pairs of *dataset*, a map-style data set, with the log-probabilities of both answers under a reference.

    Assign :attr:`scores` [pairs, 2] before samples are read. Raises :class:`RecipeError` for a stream.
    """

    # A promise about this class. The promise of the data set is examined as well.
    draws_nothing = True

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise RecipeError(
                "the reference's log-probabilities of a stream cannot be computed before training",
                where="dpo.precompute",
                value=True,
                hint=NO_STREAM,
            )
        self.dataset = dataset
        self.scores: Scores | None = None

    @property
    def identity(self) -> str | None:
        """A digest that changes with the pairs. None when unknown."""
        return getattr(self.dataset, "identity", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Item:
        pair = self.dataset[index]
        assert self.scores is not None
        chosen, rejected = self.scores[index].tolist()
        return {**pair, REFERENCE_CHOSEN: chosen, REFERENCE_REJECTED: rejected}
