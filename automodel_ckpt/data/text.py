"""Builders for documents, and for prompts with completions, from data files, directories or the Hugging Face Hub.

Samples are tokenized once and cached under a digest of the rows (:class:`~automodel_ckpt.data.source.Source`), or with
``streaming`` tokenized during training (:func:`~automodel_ckpt.data.samples.samples_of`).
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.chat import ChatTemplate, conversations, template_of
from automodel_ckpt.data.encoder import Encoder
from automodel_ckpt.data.fields import names_in
from automodel_ckpt.data.messages import prompt_and_completion
from automodel_ckpt.data.row_stream import DEFAULT_BLOCK, RowStream
from automodel_ckpt.data.rows import Rows
from automodel_ckpt.data.samples import samples_of
from automodel_ckpt.data.source import Source
from automodel_ckpt.data.tokenized import TokenizedDataset, TokenizedSample
from automodel_ckpt.data.truncation import Truncation
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)


def text(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int = 1024,
    field: str = "text",
    truncation: Literal["error", "right"] = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
    streaming: bool = False,
    shuffle_block: int = DEFAULT_BLOCK,
) -> TokenizedDataset | RowStream:
    """Make one sample per document, with labels on all tokens, including the end token.

    *field* is the field that contains the text (``text`` in ``.txt`` files), or a template of several fields, such as
    ``"{{ title }}: {{ body }}"``. A document of more than *seq_length* tokens is rejected with its location. With
    *truncation* ``right`` it is truncated, and the number of truncated documents is logged.
    """
    encoder = Encoder(tokenizer)

    def encode(rows: Rows) -> list[TokenizedSample]:
        (documents,) = rows.texts([field])
        return encoder.documents(documents)

    return samples_of(
        Source.of(path, name, split),
        tokenizer,
        encode,
        Truncation(truncation, seq_length),
        fields=names_in(field),
        key=("text", field),
        max_samples=max_samples,
        streaming=streaming,
        shuffle_block=shuffle_block,
    )


def prompt_completion(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int = 1024,
    prompt_field: str = "prompt",
    completion_field: str = "completion",
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    truncation: Literal["error", "right"] = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
    streaming: bool = False,
    shuffle_block: int = DEFAULT_BLOCK,
) -> TokenizedDataset | RowStream:
    """Make one sample per row: the prompt without labels, then the completion and the end token with labels.

    Prompt and completion are concatenated unchanged, so one of them has to contain the space or line break between
    them. Each is a field, or a Jinja template of fields, such as ``"{{ question }}\\nAnswer: "``. Both may also be
    lists of messages (TRL's conversational format). These are rendered by *chat_template* with *template_kwargs*
    (:func:`~automodel_ckpt.data.chat.messages`), with labels on the assistant messages of the completion; a field
    ``tools`` is passed to the template. A sample of more than *seq_length* tokens is rejected with its location. With
    *truncation* ``right`` it is truncated, or skipped if the prompt alone has that many tokens; the numbers are logged.
    """
    encoder = Encoder(tokenizer)
    fields = [prompt_field, completion_field]
    template = ChatTemplate(
        tokenizer, _template_text(tokenizer, chat_template), dict(template_kwargs or {}), False
    )

    # encode runs for each row of a stream, but this is logged once.
    @cache
    def report_method() -> None:
        log.info("%s: the assistant's tokens are found by %s", path, template.method)

    def encode(rows: Rows) -> list[TokenizedSample]:
        if rows.contain_messages(fields):
            # Raises the error for a missing template, which _template_text accepts for plain text.
            template_of(tokenizer, chat_template)
            report_method()
            return conversations(template, rows, fields, "tools", prompt_and_completion)
        if chat_template is not None or template_kwargs:
            raise _unused_template(fields)
        prompts, completions = rows.texts(fields)
        return encoder.pairs(prompts, completions)

    return samples_of(
        Source.of(path, name, split),
        tokenizer,
        encode,
        Truncation(truncation, seq_length),
        fields=[*names_in(prompt_field), *names_in(completion_field), "tools"],
        key=("prompt_completion", *fields, *template.key),
        max_samples=max_samples,
        streaming=streaming,
        shuffle_block=shuffle_block,
    )


def _unused_template(fields: list[str]) -> RecipeError:
    """Return the error for a chat template of rows that are plain text."""
    return RecipeError(
        "a chat template is set, but prompts and completions are plain text",
        where="dataset.chat_template, dataset.template_kwargs",
        value=", ".join(fields),
        hint="remove these settings, or provide prompt and completion as lists of messages",
    )


def _template_text(tokenizer: PreTrainedTokenizerBase, given: str | None) -> str:
    """Return the chat template; empty text if neither the recipe nor the tokenizer has one: plain text needs none."""
    if given is None and not tokenizer.chat_template:
        return ""
    return template_of(tokenizer, given)
