"""Conversations in data files, as samples with labels on the assistant's text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.messages import (
    REASONING,
    Turns,
    at_row,
    is_empty,
    turns_of,
)
from automodel_ckpt.data.conversations.template_choice import template_of
from automodel_ckpt.data.rows.arguments import RowOptions, require_choice
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import Samples, TokenizedSample
from automodel_ckpt.data.samples.truncation import Truncation

log = logging.getLogger(__name__)

_DEFAULT_FIELD = "messages"
_OTHER_FIELD = "conversations"
"""The field of conversations in ShareGPT's data."""


def messages(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int | None = 2048,
    messages_field: str = "messages",
    tools_field: str = "tools",
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    learn: Literal["all", "last"] = "all",
    mask_reasoning: bool = False,
    drop_earlier_reasoning: bool = False,
    end_with_answer: bool = False,
    skip_unanswered: bool = False,
    truncation: Literal["error", "right", "skip", "history"] = "error",
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make one sample per conversation, with labels on the assistant's text and the end of its turns.

    A conversation is a list of ``{"role", "content", ...}``, or of ShareGPT's ``{"from", "value"}``, also as JSON text.
    The field ``conversations`` is read if there is no field ``messages``. An answer with ``"weight": 0`` has no labels.
    Templates that support only text get the text of contents that are lists of text parts; those that require objects
    get the arguments of ``tool_calls`` as objects. Messages with the roles ``tool_call`` and ``tool_response`` are
    converted (:func:`~automodel_ckpt.data.conversations.messages.with_tool_calls`).

    Raises :class:`RecipeError` with the location of a sample that is not a conversation, that the template cannot
    render, whose tools it omits, whose answers cannot be located in the template's output, or that has no label.
    """
    require_choice("learn", learn, ("all", "last"))
    template = ChatTemplate(
        tokenizer,
        template_of(tokenizer, chat_template),
        dict(template_kwargs or {}),
        learn == "last",
        mask_reasoning,
        max_tokens=seq_length if truncation == "history" else None,
    )
    changes = {
        "drop_earlier_reasoning": drop_earlier_reasoning,
        "end_with_answer": end_with_answer,
        "skip_unanswered": skip_unanswered,
    }

    def turns_after_changes(conversation: Any) -> Turns:
        turns = turns_of(conversation)
        answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        if not answers:
            # It is reported as unusable.
            return [] if skip_unanswered else turns
        if end_with_answer:
            turns = turns[: answers[-1] + 1]
        for number in answers[:-1] if drop_earlier_reasoning else ():
            turn = turns[number]
            turns[number] = {key: turn[key] for key in turn if key not in REASONING}
        return turns

    def encode(rows: Rows) -> Samples:
        field = messages_field
        is_default = field == _DEFAULT_FIELD
        if is_default and not rows.has_field(field) and rows.has_field(_OTHER_FIELD):
            field = _OTHER_FIELD
        return conversations(template, rows, [field], tools_field, turns_after_changes)

    log.info("%s: the assistant's tokens are found by %s", path, template.method)
    if template.renderer.writes_the_date:
        log.warning(
            "%s: the chat template writes today's date into every sample; for reproducible samples set a fixed date, "
            "for example dataset.template_kwargs.date_string '26 Jul 2024'",
            path,
        )
    return samples_of(
        path,
        tokenizer,
        encode,
        Truncation.of(truncation, seq_length),
        fields=(messages_field, _OTHER_FIELD, tools_field),
        # Without changes that are not made, so that the keys of samples that do not need them stay the same.
        key=("messages", messages_field, tools_field, *template.key, *filter(changes.get, changes)),
        template=template.method,
        **options,
    )


def conversations(
    template: ChatTemplate,
    rows: Rows,
    fields: Sequence[str],
    tools_field: str,
    turns: Callable[..., list[dict[str, Any]]],
) -> Samples:
    """Make a sample of each row: *turns* makes a conversation of the row's values of *fields*.

    If *turns* returns no message, the sample has no token. Raises :class:`RecipeError` with the row's location for a
    row that cannot be used as a conversation.
    """
    columns = rows.columns(fields)
    tools: list[Any] = [None] * len(columns[0])
    if rows.has_field(tools_field):
        tools = rows.values(tools_field)

    def conversation(row: int) -> tuple[Turns, Any]:
        return turns(*(column[row] for column in columns)), tools[row]

    return conversations_of(template, rows, conversation)


def conversations_of(
    template: ChatTemplate,
    rows: Rows,
    conversation: Callable[[int], tuple[Turns, Any]],
) -> Samples:
    """Make a sample of each row n of *rows*: ``conversation(n)`` returns its messages, and its tools or None.

    If there is no message, the sample has no token. Raises :class:`RecipeError` with the row's location if
    *conversation* or *template* raises :class:`UnusableSample`.
    """
    samples = []
    for row in range(rows.num_rows):
        # Without a message, the row is skipped, as every sample without a label.
        sample = TokenizedSample([], [])
        with at_row(rows, row):
            found, tools = conversation(row)
            if found:
                sample = template.sample(found, tools)
        has_empty_answer = any(is_empty(turn) for turn in found)
        samples.append(sample._replace(is_empty=has_empty_answer))
    return samples
