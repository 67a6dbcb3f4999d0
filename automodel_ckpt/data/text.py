"""Builders for documents, and for prompts with completions, from data files, directories or the Hugging Face Hub.

Samples are tokenized once and cached under a digest of the rows (:class:`~automodel_ckpt.data.rows.source.Source`), or
with
``streaming`` tokenized during training (:func:`~automodel_ckpt.data.samples.samples.samples_of`).
"""

from __future__ import annotations

from typing import Any, Literal, Unpack

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.collate import RowOptions, require_choice
from automodel_ckpt.data.rows.rows import Rows, names_in
from automodel_ckpt.data.samples.encoder import Encoder
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import Samples, Truncation


def text(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int | None = 1024,
    field: str = "text",
    truncation: Literal["error", "right", "skip"] = "error",
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make one sample per document, with labels on all tokens, including the end token.

    *field* is the field that contains the text (``text`` in ``.txt`` files), or a template of several fields, such as
    ``"{{ title }}: {{ body }}"``. A document of more than *seq_length* tokens is rejected with its location. With
    *truncation* ``right`` it is truncated, with ``skip`` it is skipped, and the numbers of such documents are logged.
    """
    encoder = Encoder(tokenizer)

    def encode(rows: Rows) -> Samples:
        (documents,) = rows.texts([field])
        return encoder.documents(documents)

    return samples_of(
        path,
        tokenizer,
        encode,
        Truncation.of(truncation, seq_length),
        fields=names_in(field),
        key=("text", field),
        **options,
    )


def prompt_completion(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str],
    seq_length: int | None = 1024,
    prompt_field: str = "prompt",
    completion_field: str = "completion",
    system_field: str | None = None,
    as_chat: Literal["auto"] | bool = False,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    learn: Literal["completion", "all"] = "completion",
    truncation: Literal["error", "right", "skip"] = "error",
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make one sample per row: the prompt without labels, then the completion and the end token with labels.

    Prompt and completion are concatenated unchanged, so one of them has to contain the space or line break between
    them. Each is a field, or a Jinja template of fields, such as ``"{{ question }}\\nAnswer: "``. Both may also be
    lists of messages (TRL's conversational format). These are rendered by *chat_template* with *template_kwargs*
    (:func:`~automodel_ckpt.data.chat.messages`), with labels on the assistant messages of the completion; a field
    ``tools`` is passed to the template.

    With *as_chat*, texts are rendered by the chat template too, the prompt as a message of the user after the text of
    *system_field*, if it is set; with ``auto``, only if the tokenizer has a chat template. With *learn* ``all``, all
    tokens have labels. A sample of more than *seq_length* tokens is rejected with its location. With *truncation*
    ``right`` it is truncated, or skipped if the prompt alone has that many tokens, and with ``skip`` it is always
    skipped; the numbers are logged.
    """
    require_choice("learn", learn, ("completion", "all"))
    from automodel_ckpt.data.chat import PairEncoder

    pairs = PairEncoder(
        tokenizer,
        prompt_field,
        completion_field,
        system_field,
        as_chat,
        chat_template,
        dict(template_kwargs or {}),
        learn,
    )
    return samples_of(
        path,
        tokenizer,
        pairs.encode,
        Truncation.of(truncation, seq_length),
        fields=pairs.names,
        key=("prompt_completion", *pairs.key),
        **options,
    )
