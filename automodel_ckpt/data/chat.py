"""Conversations in data files, and prompts with completions as texts or in a chat template, as samples with labels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal, Unpack

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.collate import Key, RowOptions, require_choice, require_tokenizer
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.messages import (
    REASONING,
    Object,
    Turns,
    at_row,
    is_empty,
    prompt_and_completion,
    turns_of,
)
from automodel_ckpt.data.conversations.template_choice import template_of
from automodel_ckpt.data.rows.rows import Rows, names_in
from automodel_ckpt.data.samples.encoder import Encoder
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import (
    REPEATED_PROMPT,
    Samples,
    TokenizedSample,
    Truncation,
)
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

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
    render, with tools that it omits or answers that cannot be located in its output, or that has no label.
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
        if field == "messages" and field not in rows.fields and _OTHER_FIELD in rows.fields:
            field = _OTHER_FIELD
        [column] = rows.columns([field])
        tools = _tools_in(rows, tools_field)
        return conversations_of(
            template, rows, lambda row: (turns_after_changes(column[row]), tools[row])
        )

    log.debug("%s: the assistant's tokens are found by %s", path, template.method)
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


def _tools_in(rows: Rows, field: str) -> list[Any]:
    """The tools of each row; None without any."""
    return rows.values(field) if field in rows.fields else [None] * rows.num_rows


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
        with at_row(rows, row):
            found, tools = conversation(row)
            # Without a message, the row is skipped, as every sample without a label.
            sample = template.sample(found, tools) if found else TokenizedSample([], [])
        samples.append(sample._replace(is_empty=any(map(is_empty, found))))
    return samples


AsChat = Literal["auto"] | bool


@dataclass(frozen=True)
class PairEncoder:
    """Makes a sample of each row's prompt and completion. The fields are names or Jinja templates of several fields.

    Raises :class:`RecipeError` for a *system_field* without *as_chat*.
    """

    tokenizer: PreTrainedTokenizerBase
    prompt_field: str
    completion_field: str
    system_field: str | None
    as_chat: AsChat
    chat_template: str | None
    template_kwargs: Object
    learn: Literal["completion", "all"]

    def __post_init__(self) -> None:
        if self.system_field is not None and not self.as_chat:
            raise self._no_system_message(
                "prompts are not rendered as messages", "set dataset.as_chat true"
            )

    def encode(self, rows: Rows) -> Samples:
        """Make a sample of each row. Raises :class:`RecipeError` with the location of a row that cannot be used."""
        samples = self._encode(rows)
        if self.learn == "all":
            for number, sample in enumerate(samples):
                # One without any label stays as it is, because it is skipped.
                labelled = [any(sample.labelled)] * len(sample.tokens)
                samples[number] = sample._replace(labelled=labelled)
        return samples

    @property
    def names(self) -> list[str]:
        """The fields of the data that are used."""
        return [*chain.from_iterable(map(names_in, self._text_fields)), "tools"]

    @property
    def key(self) -> Key:
        """Everything that the samples depend on besides the tokenizer."""
        key: Key = (self.prompt_field, self.completion_field, *self._template.key)
        # Options are added if they are set, so that the keys of samples that do not need them stay the same.
        if self.as_chat:
            key += ("as_chat", self.as_chat, self.system_field)
        if self.learn == "all":
            key += ("learn", self.learn)
        return key

    @cached_property
    def _texts(self) -> Encoder:
        return Encoder(self.tokenizer)

    @property
    def _text_fields(self) -> list[str]:
        fields = [self.prompt_field, self.completion_field]
        if self.system_field is not None:
            fields.append(self.system_field)
        return fields

    @cached_property
    def _template(self) -> ChatTemplate:
        """The template of messages; empty if neither the recipe nor the tokenizer has one, for plain text."""
        text = ""
        if self.chat_template is not None or require_tokenizer(self.tokenizer).chat_template:
            text = template_of(self.tokenizer, self.chat_template)
        return ChatTemplate(self.tokenizer, text, self.template_kwargs, False)

    def _encode(self, rows: Rows) -> Samples:
        fields = [self.prompt_field, self.completion_field]
        if rows.contain_messages(fields):
            columns = rows.columns(fields)
            tools = _tools_in(rows, "tools")
            return conversations_of(
                self._message_template,
                rows,
                lambda row: (prompt_and_completion(*(each[row] for each in columns)), tools[row]),
            )
        template = None
        if pair_template(self.tokenizer, self.as_chat, self.chat_template, self.template_kwargs):
            template = self._message_template
        prompts, completions, *systems = rows.texts(self._text_fields)
        if template is None and systems:
            raise self._no_system_message(
                "the tokenizer has no chat template", "set dataset.chat_template"
            )
        if template is None:
            samples = self._texts.pairs(prompts, completions)
        else:
            samples = chat_pairs(template, rows, prompts, completions, *systems)
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            start = prompt.strip()
            if start and completion.lstrip().startswith(start):
                notes = (*samples[number].notes, REPEATED_PROMPT)
                samples[number] = samples[number]._replace(notes=notes)
        return samples

    @cached_property
    def _message_template(self) -> ChatTemplate:
        """The template of messages; logs once how it locates the assistant's tokens."""
        # Raises the error for a missing template, which _template accepts for plain text.
        template_of(self.tokenizer, self.chat_template)
        log.debug("the assistant's tokens are found by %s", self._template.method)
        return self._template

    def _no_system_message(self, reason: str, hint: str) -> RecipeError:
        return RecipeError(
            f"system_field is set, but {reason}",
            where="dataset.system_field",
            value=self.system_field,
            hint=f"{hint}, or write the field into dataset.prompt_field: '{{{{ a }}}} {{{{ b }}}}'",
        )


def pair_template(
    tokenizer: PreTrainedTokenizerBase,
    as_chat: AsChat,
    chat_template: str | None,
    template_kwargs: Object | None = None,
) -> ChatTemplate | None:
    """Return the template that renders prompts and completions. Returns None when they are concatenated as text.

    With *as_chat* ``auto``, a template is used if *chat_template* is given or the tokenizer has one. Raises
    :class:`RecipeError` if *as_chat* is true and there is none, and if *chat_template* or
    *template_kwargs* is given and *as_chat* is false.
    """
    is_given = chat_template is not None
    if not as_chat:
        if is_given or template_kwargs:
            raise RecipeError(
                "a chat template is set, but prompts and completions are plain text without dataset.as_chat",
                where="dataset.chat_template, dataset.template_kwargs",
                value=str(chat_template or template_kwargs)[:80],
                hint="",
            )
        return None
    if as_chat == "auto" and not is_given and not require_tokenizer(tokenizer).chat_template:
        return None
    template = template_of(tokenizer, chat_template)
    return ChatTemplate(tokenizer, template, dict(template_kwargs or {}), False)


def chat_pairs(
    template: ChatTemplate,
    rows: Rows,
    prompts: Sequence[str],
    completions: Sequence[str],
    systems: Sequence[str] | None = None,
) -> Samples:
    """Make a sample of each prompt and completion, rendered by *template*, with labels on the assistant's answer.

    *systems* are texts of system messages; an empty text adds no message. Raises :class:`RecipeError` with the row's
    location for a row that the template cannot render.
    """

    def conversation(row: int) -> tuple[Turns, None]:
        turns = [
            {"role": "user", "content": prompts[row]},
            {"role": "assistant", "content": completions[row]},
        ]
        if systems is not None and systems[row]:
            turns.insert(0, {"role": "system", "content": systems[row]})
        return turns_of(turns), None

    return conversations_of(template, rows, conversation)
