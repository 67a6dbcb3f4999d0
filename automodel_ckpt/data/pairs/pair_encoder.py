"""Tokenize prompts with completions: as concatenated texts, as lists of messages, or as texts in a chat template."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.chat import conversations, conversations_of
from automodel_ckpt.data.collate import Key
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.messages import (
    Object,
    Turns,
    prompt_and_completion,
    turns_of,
)
from automodel_ckpt.data.conversations.template_choice import template_of
from automodel_ckpt.data.rows.arguments import require_tokenizer
from automodel_ckpt.data.rows.rows import Rows, names_in
from automodel_ckpt.data.samples.encoder import Encoder
from automodel_ckpt.data.samples.tokenized import REPEATED_PROMPT, Samples
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

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
            return conversations(
                self._message_template, rows, fields, "tools", prompt_and_completion
            )
        template = self._pair_template
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
        log.info("the assistant's tokens are found by %s", self._template.method)
        return self._template

    @cached_property
    def _pair_template(self) -> ChatTemplate | None:
        """The template of texts with ``as_chat``. None when they are concatenated."""
        template = pair_template(
            self.tokenizer, self.as_chat, self.chat_template, self.template_kwargs
        )
        return None if template is None else self._message_template

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
                "a chat template is set, but prompts and completions are plain text",
                where="dataset.chat_template, dataset.template_kwargs",
                value=str(chat_template or template_kwargs)[:80],
                hint="set dataset.as_chat true, or remove these settings",
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
