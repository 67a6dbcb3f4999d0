"""SQuAD: a question about a paragraph, answered in the paragraph's words."""

from __future__ import annotations

from typing import Literal, Unpack

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.chat import chat_pairs, pair_template
from automodel_ckpt.data.collate import Key, RowOptions
from automodel_ckpt.data.rows.rows import Rows, names_in
from automodel_ckpt.data.samples.encoder import Encoder
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import Samples, Truncation

PROMPT = "Context: {{ context | trim }}\nQuestion: {{ question | trim }}\nAnswer:"
"""The default prompt of :func:`squad`."""


def squad(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str] = "rajpurkar/squad",
    seq_length: int | None = 1024,
    no_answer: str | None = None,
    prompt: str = PROMPT,
    as_chat: Literal["auto"] | bool = False,
    chat_template: str | None = None,
    truncation: Literal["error", "right", "skip"] = "error",
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make a sample of each row: the paragraph and the question without labels, and the first answer with labels.

    *path* is a data set of the Hub, or a local file or directory, with the columns ``context``, ``question`` and
    ``answers`` (``{"text": list[str], ...}``). *no_answer* is the completion for a question without an answer, as in
    SQuAD 2.0; without it, such a row is rejected with its location. *prompt* is a Jinja template of ``context`` and
    ``question``. With *as_chat*, the prompt is a message of the user and the answer one of the assistant, rendered by
    *chat_template*, by default the tokenizer's; with ``auto``, only if the tokenizer has one. Otherwise the answer
    follows the prompt after a space, unless the prompt ends with white space. For *truncation* and *streaming* see
    :func:`~automodel_ckpt.data.text.prompt_completion`.
    """
    encoder = Encoder(tokenizer)
    template = pair_template(tokenizer, as_chat, chat_template)

    def encode(rows: Rows) -> Samples:
        # A template writes a missing field as empty text, so the fields are checked before.
        rows.texts(names_in(prompt))
        (prompts,) = rows.texts([prompt])
        (found,) = rows.columns(["answers"])
        answers = []
        for row, each in enumerate(found):
            texts = each.get("text") if isinstance(each, dict) else None
            is_valid = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
            if not is_valid or (not texts and no_answer is None):
                raise rows.unusable(
                    row,
                    "a question has no answer in SQuAD's format",
                    each,
                    'use {"text": ["..."], "answer_start": [0]}; for questions without an answer, set '
                    "dataset.no_answer to the text that the model should answer",
                )
            answers.append(texts[0].strip() if texts else str(no_answer))
        if template is not None:
            return chat_pairs(template, rows, prompts, answers)
        completions = []
        for text, answer in zip(prompts, answers, strict=True):
            completions.append(answer if text != text.rstrip() else f" {answer}")
        return encoder.pairs(prompts, completions)

    key: Key = ("squad", repr(no_answer))
    # Options are added if they are set, so that the keys of samples that do not need them stay the same.
    if prompt != PROMPT:
        key += ("prompt", prompt)
    if template is not None:
        key += ("as_chat", *template.key)
    return samples_of(
        path,
        tokenizer,
        encode,
        Truncation.of(truncation, seq_length),
        key=key,
        **options,
    )
