"""Makes a data set of a source and a function that tokenizes its rows: prepared once and cached, or a stream."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.encode import Truncation, identity, prepared
from automodel_ckpt.data.row_stream import Encode, RowStream, row_stream
from automodel_ckpt.data.source import Source
from automodel_ckpt.data.tokenized import TokenizedDataset

log = logging.getLogger(__name__)


def samples_of(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    encode: Encode,
    policy: Truncation,
    *,
    key: tuple[object, ...],
    max_samples: int | None,
    streaming: bool,
    shuffle_block: int,
    fields: Sequence[str] | None = None,
) -> TokenizedDataset | RowStream:
    """The samples that *encode* makes of the rows of *source*, truncated by *policy*, at most *max_samples* of them.

    They are cached under *key*: the builder's name, and everything that the samples depend on besides the other
    arguments. When they are prepared, the data's fields that are not in *fields* are logged as unused. With
    *streaming*, nothing is cached: rows are read and tokenized during training, in the order of the source or
    (``dataloader.shuffle``) shuffled within blocks of *shuffle_block* rows. Raises :class:`RecipeError` for data that
    cannot be read or tokenized.
    """
    policy_key = (*key, policy.seq_length, policy.policy)
    if streaming:
        stream = row_stream(source, encode, policy, block=shuffle_block, max_samples=max_samples)
        stream.identity = identity((source.outline(), *policy_key), tokenizer)
        return stream

    def build() -> TokenizedDataset:
        samples = encode(source)
        if fields is not None:
            _report_unused(source, fields)
        return policy.apply_to_all(samples, source.place)

    whole_key = (source.fingerprint(), *policy_key)
    dataset = prepared(str(key[0]), whole_key, tokenizer, build)
    dataset.report_truncation(source.path, policy.seq_length)
    dataset = dataset.first(max_samples)
    dataset.identity = identity(whole_key, tokenizer)
    return dataset


def _report_unused(source: Source, used: Sequence[str]) -> None:
    unused = [field for field in source.fields if field not in used]
    if unused:
        log.info("%s: unused fields: %s", source.path, ", ".join(unused))
