"""Documents, and prompts with their completions, of a data file, a directory or the Hugging Face Hub.

Tokenized once and kept in the cache under a digest of the rows (see :class:`~automodel_ckpt.data.source.Source`), or
with ``streaming`` while they are used (see :func:`~automodel_ckpt.data.samples.samples_of`).
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.encode import Encoder, Truncation
from automodel_ckpt.data.rowstream import DEFAULT_BLOCK, RowStream
from automodel_ckpt.data.samples import samples_of
from automodel_ckpt.data.source import Rows, Source
from automodel_ckpt.data.tokenized import TokenizedDataset, TokenizedSample


def text(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    seq_length: int = 1024,
    field: str = "text",
    truncation: str = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
    streaming: bool = False,
    shuffle_block: int = DEFAULT_BLOCK,
) -> TokenizedDataset | RowStream:
    """One sample per document, learnt as a whole, its end token included.

    *field* names the column that holds the text (of ``.txt`` it is ``text``). A document of more than *seq_length*
    tokens is refused with its place, or with *truncation* ``right`` cut and counted in the log.
    """
    encoder = Encoder(tokenizer)

    def encode(rows: Rows) -> list[TokenizedSample]:
        (documents,) = rows.texts([field])
        return encoder.documents(documents)

    return samples_of(
        Source(path, name, split), tokenizer, encode, Truncation(truncation, seq_length), key=("text", field),
        max_samples=max_samples, streaming=streaming, shuffle_block=shuffle_block,
    )  # fmt: skip


def prompt_completion(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    seq_length: int = 1024,
    prompt_field: str = "prompt",
    completion_field: str = "completion",
    truncation: str = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
    streaming: bool = False,
    shuffle_block: int = DEFAULT_BLOCK,
) -> TokenizedDataset | RowStream:
    """A sample per row: the prompt without labels, then the completion and the end token with them.

    Prompt and completion are joined as they are: a space or line break between them belongs to one of the two. A sample
    of more than *seq_length* tokens is refused with its place; with *truncation* ``right`` it is cut, or left out where
    the prompt alone is as long, with the counts in the log.
    """
    encoder = Encoder(tokenizer)

    def encode(rows: Rows) -> list[TokenizedSample]:
        prompts, completions = rows.texts([prompt_field, completion_field])
        return encoder.pairs(prompts, completions)

    key = ("prompt_completion", prompt_field, completion_field)
    return samples_of(
        Source(path, name, split), tokenizer, encode, Truncation(truncation, seq_length), key=key,
        max_samples=max_samples, streaming=streaming, shuffle_block=shuffle_block,
    )  # fmt: skip
