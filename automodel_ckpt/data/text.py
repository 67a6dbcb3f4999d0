"""Documents, and prompts with their completions, of a data file, a directory or the Hugging Face Hub.

Tokenized once and kept in the cache under a digest of the rows (see :class:`~automodel_ckpt.data.source.Source`).
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.encode import Encoder, Truncation, prepared
from automodel_ckpt.data.source import Source
from automodel_ckpt.data.tokenized import TokenizedDataset


def text(
    tokenizer: PreTrainedTokenizerBase,
    path: str,
    seq_length: int = 1024,
    field: str = "text",
    truncation: str = "error",
    max_samples: int | None = None,
    name: str | None = None,
    split: str = "train",
) -> TokenizedDataset:
    """One sample per document, learnt as a whole, its end token included.

    *field* names the column that holds the text (of ``.txt`` it is ``text``). A document of more than *seq_length*
    tokens is refused with its place, or with *truncation* ``right`` cut and counted in the log.
    """
    policy, source = Truncation(truncation, seq_length), Source(path, name, split)

    def build() -> TokenizedDataset:
        (documents,) = source.texts([field])
        return policy.apply_to_all(Encoder(tokenizer).documents(documents), source.place)

    dataset = prepared("text", (source.fingerprint(), field, seq_length, truncation), tokenizer, build)
    dataset.tell_truncation(path, seq_length)
    return dataset.first(max_samples)


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
) -> TokenizedDataset:
    """A sample per row: the prompt without labels, then the completion and the end token with them.

    Prompt and completion are joined as they are: a space or line break between them belongs to one of the two. A sample
    of more than *seq_length* tokens is refused with its place; with *truncation* ``right`` it is cut, or left out where
    the prompt alone is as long, with the counts in the log.
    """
    policy, source = Truncation(truncation, seq_length), Source(path, name, split)

    def read() -> tuple[list[str], list[str]]:
        prompts, completions = source.texts([prompt_field, completion_field])
        return prompts, completions

    key = ("prompt_completion", prompt_field, completion_field)
    return prepared_pairs(tokenizer, source, policy, key, read).first(max_samples)


def prepared_pairs(
    tokenizer: PreTrainedTokenizerBase,
    source: Source,
    policy: Truncation,
    key: tuple[str, ...],
    read: Callable[[], tuple[list[str], list[str]]],
) -> TokenizedDataset:
    """The samples of the prompts and completions that *read* makes of the rows of *source*.

    They are kept in the cache under *key*: the builder's name, and what they depend on beside *source* and *policy*.
    """

    def build() -> TokenizedDataset:
        return policy.apply_to_all(Encoder(tokenizer).pairs(*read()), source.place)

    whole_key = (source.fingerprint(), *key, policy.seq_length, policy.policy)
    dataset = prepared(key[0], whole_key, tokenizer, build)
    dataset.tell_truncation(source.path, policy.seq_length)
    return dataset
