"""Prompts and completions as conversations: a message of the user and the assistant's answer, by a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.chat import conversations_of
from automodel_ckpt.data.conversations.chat_template import ChatTemplate
from automodel_ckpt.data.conversations.messages import turns_of
from automodel_ckpt.data.conversations.template_choice import template_of
from automodel_ckpt.data.rows.arguments import require_tokenizer
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.samples.tokenized import TokenizedSample
from automodel_ckpt.errors import RecipeError

AsChat = Literal["auto"] | bool


def pair_template(
    tokenizer: PreTrainedTokenizerBase,
    as_chat: AsChat,
    chat_template: str | None,
    template_kwargs: dict[str, Any] | None = None,
) -> ChatTemplate | None:
    """Return the template that renders prompts and completions; None if they are concatenated as text.

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
) -> list[TokenizedSample]:
    """Make a sample of each prompt and completion, rendered by *template*, with labels on the assistant's answer.

    *systems* are texts of system messages; an empty text adds no message. Raises :class:`RecipeError` with the row's
    location for a row that the template cannot render.
    """

    def conversation(row: int) -> tuple[list[dict[str, Any]], None]:
        turns = [
            {"role": "user", "content": prompts[row]},
            {"role": "assistant", "content": completions[row]},
        ]
        if systems is not None and systems[row]:
            turns.insert(0, {"role": "system", "content": systems[row]})
        return turns_of(turns), None

    return conversations_of(template, rows, conversation)
