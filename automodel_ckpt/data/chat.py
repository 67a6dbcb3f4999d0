"""Conversations in data files, as samples with labels on the assistant's text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.conversation_changes import ConversationChanges
from automodel_ckpt.data.conversations.messages import UnusableSample, is_empty
from automodel_ckpt.data.conversations.template_choice import template_of
from automodel_ckpt.data.rows.arguments import require_choice
from automodel_ckpt.data.rows.row_stream import DEFAULT_BLOCK, RowStream
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.samples import samples_of
from automodel_ckpt.data.samples.tokenized import TokenizedDataset, TokenizedSample
from automodel_ckpt.data.samples.truncation import Truncation
from automodel_ckpt.errors import RecipeError

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
    special_tokens_as_text: bool = False,
    truncation: Literal["error", "right", "skip", "history"] = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    streaming: bool = False,
    shuffle_block: int = DEFAULT_BLOCK,
) -> TokenizedDataset | RowStream:
    """Make one sample per conversation, with labels on the assistant's text and the end of its turns.

    A conversation is a list of ``{"role", "content", ...}``, or of ShareGPT's ``{"from", "value"}``, also as JSON text.
    The field ``conversations`` is read if there is no field ``messages``. An answer with ``"weight": 0`` has no labels.
    Templates that support only text get the text of contents that are lists of text parts; those that require objects
    get the arguments of ``tool_calls`` as objects. Messages with the roles ``tool_call`` and ``tool_response`` are
    converted (:func:`~automodel_ckpt.data.conversations.tool_turns.with_tool_calls`).

    Raises :class:`RecipeError` with the location of a sample that is not a conversation, that the template cannot
    render, whose tools it omits, whose answers cannot be located in the template's output, or that has no label.
    """
    require_choice("learn", learn, ("all", "last"))
    source = Source.of(path, name, split, revision)
    template = ChatTemplate(
        tokenizer,
        template_of(tokenizer, chat_template),
        dict(template_kwargs or {}),
        learn == "last",
        mask_reasoning,
        max_tokens=seq_length if truncation == "history" else None,
        special_tokens_as_text=special_tokens_as_text,
    )
    changes = ConversationChanges(drop_earlier_reasoning, end_with_answer, skip_unanswered)
    encoder = ConversationEncoder(template, changes, messages_field, tools_field)
    _log_template(source, template)
    return samples_of(
        source,
        tokenizer,
        encoder.encode,
        Truncation.of(truncation, seq_length),
        fields=encoder.names,
        key=encoder.key,
        template=template.method,
        max_samples=max_samples,
        streaming=streaming,
        shuffle_block=shuffle_block,
    )


def _log_template(source: Source, template: ChatTemplate) -> None:
    """Log how the assistant's tokens are located, and warn of a template that writes the date."""
    log.info("%s: the assistant's tokens are found by %s", source.path, template.method)
    if template.renderer.writes_the_date:
        log.warning(
            "%s: the chat template writes today's date into every sample; for reproducible samples set a fixed date, "
            "for example dataset.template_kwargs.date_string '26 Jul 2024'",
            source.path,
        )


@dataclass(frozen=True)
class ConversationEncoder:
    """Tokenizes the conversations in rows, after the *changes* that a recipe asks for.

    A conversation is in *messages_field*, its tools in *tools_field*, if the data has that.
    """

    template: ChatTemplate
    changes: ConversationChanges
    messages_field: str
    tools_field: str

    @property
    def names(self) -> tuple[str, ...]:
        """The fields that are read."""
        return (self.messages_field, _OTHER_FIELD, self.tools_field)

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that the samples depend on besides the rows and the tokenizer."""
        fields = (self.messages_field, self.tools_field)
        return ("messages", *fields, *self.template.key, *self.changes.key)

    def encode(self, rows: Rows) -> list[TokenizedSample]:
        """Make a sample of each row. Raises :class:`RecipeError` with the location of an unusable one."""
        field = self.field_in(rows)
        return conversations(self.template, rows, [field], self.tools_field, self.changes.turns)

    def field_in(self, rows: Rows) -> str:
        """The field of the conversations, or ShareGPT's if the data has that and not the default one."""
        given = self.messages_field
        if given == _DEFAULT_FIELD and not rows.has_field(given) and rows.has_field(_OTHER_FIELD):
            return _OTHER_FIELD
        return given


def conversations(
    template: ChatTemplate,
    rows: Rows,
    fields: Sequence[str],
    tools_field: str,
    turns: Callable[..., list[dict[str, Any]]],
) -> list[TokenizedSample]:
    """Make a sample of each row: *turns* makes a conversation of the row's values of *fields*.

    If *turns* returns no message, the sample has no token. Raises :class:`RecipeError` with the row's location for a
    row that cannot be used as a conversation.
    """
    columns = rows.columns(fields)
    tools: list[Any] = [None] * len(columns[0])
    if rows.has_field(tools_field):
        tools = rows.values(tools_field)

    def conversation(row: int) -> tuple[list[dict[str, Any]], Any]:
        return turns(*(column[row] for column in columns)), tools[row]

    return conversations_of(template, rows, conversation)


def conversations_of(
    template: ChatTemplate,
    rows: Rows,
    conversation: Callable[[int], tuple[list[dict[str, Any]], Any]],
) -> list[TokenizedSample]:
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


@contextmanager
def at_row(rows: Rows, row: int) -> Iterator[None]:
    """Raise an :class:`UnusableSample` of the block as :class:`RecipeError` with the location of the row."""
    try:
        yield
    except UnusableSample as error:
        where = f"sample {rows.number_in_data(row)} ({rows.place(row)})"
        raise RecipeError(error.what, where=where, value=error.value, hint=error.hint) from error
