"""SQuAD: a question about a paragraph, answered in the paragraph's words."""

from __future__ import annotations

from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.encoder import Encoder
from automodel_ckpt.data.row_stream import DEFAULT_BLOCK, RowStream
from automodel_ckpt.data.rows import Rows
from automodel_ckpt.data.samples import samples_of
from automodel_ckpt.data.source import Source
from automodel_ckpt.data.tokenized import TokenizedDataset, TokenizedSample
from automodel_ckpt.data.truncation import Truncation
from automodel_ckpt.errors import RecipeError


def squad(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str] = "rajpurkar/squad",
    seq_length: int = 1024,
    split: str = "train",
    no_answer: str | None = None,
    truncation: Literal["error", "right"] = "error",
    max_samples: int | None = None,
    streaming: bool = False,
    shuffle_block: int = DEFAULT_BLOCK,
) -> TokenizedDataset | RowStream:
    """Make a sample of each row: the paragraph and the question without labels, and the first answer with labels.

    *path* is a data set of the Hub, or a local file or directory, with the columns ``context``, ``question`` and
    ``answers`` (``{"text": list[str], ...}``). *no_answer* is the completion for a question without an answer, as in
    SQuAD 2.0; without it, such a row is rejected with its location. For *truncation* and *streaming* see
    :func:`~automodel_ckpt.data.text.prompt_completion`.
    """
    encoder = Encoder(tokenizer)

    def encode(rows: Rows) -> list[TokenizedSample]:
        contexts, questions = rows.texts(["context", "question"])
        (answers,) = rows.columns(["answers"])
        prompts = []
        for context, question in zip(contexts, questions, strict=True):
            prompts.append(f"Context: {context.strip()}\nQuestion: {question.strip()}\nAnswer:")
        completions = []
        for row, found in enumerate(answers):
            answer = _answer(rows, row, found, no_answer)
            completions.append(f" {answer}")
        return encoder.pairs(prompts, completions)

    key = ("squad", repr(no_answer))
    return samples_of(
        Source.of(path, split=split),
        tokenizer,
        encode,
        Truncation(truncation, seq_length),
        key=key,
        max_samples=max_samples,
        streaming=streaming,
        shuffle_block=shuffle_block,
    )


def _answer(source: Rows, row: int, answers: Any, no_answer: str | None) -> str:
    texts = answers.get("text") if isinstance(answers, dict) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        hint = 'use {"text": ["..."], "answer_start": [0]}'
        raise RecipeError(
            "the answers are not in SQuAD's format",
            where=source.place(row),
            value=answers,
            hint=hint,
        )
    if texts:
        return str(texts[0]).strip()
    if no_answer is None:
        hint = "set dataset.no_answer to the text that the model should answer"
        raise RecipeError(
            "a question has no answer", where=source.place(row), value=answers, hint=hint
        )
    return no_answer
