"""From a source and a way to tokenize its rows to a data set: prepared once and kept, or read as a stream."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.encode import Truncation, identity, prepared
from automodel_ckpt.data.rowstream import Encode, RowStream, row_stream
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
    """The samples that *encode* makes of the rows of *source*, cut by *policy*, and *max_samples* of them at most.

    They are kept in the cache under *key*: the builder's name, and what they depend on beside the others; when they
    are made, the log names the data's fields that are none of *fields*. With
    *streaming* nothing is kept: rows are read and tokenized while they are used, in the order of the source, or
    (``dataloader.shuffle``) shuffled within blocks of *shuffle_block* rows.
    """
    policy_key = (*key, policy.seq_length, policy.policy)
    if streaming:
        stream = row_stream(source, encode, policy, block=shuffle_block, max_samples=max_samples)
        stream.identity = identity((source.outline(), *policy_key), tokenizer)
        return stream

    def build() -> TokenizedDataset:
        samples = encode(source)
        unused = [] if fields is None else [field for field in source.fields if field not in fields]
        if unused:
            log.info("%s: unused fields: %s", source.path, ", ".join(unused))
        return policy.apply_to_all(samples, source.place)

    whole_key = (source.fingerprint(), *policy_key)
    dataset = prepared(str(key[0]), whole_key, tokenizer, build)
    dataset.report_truncation(source.path, policy.seq_length)
    dataset = dataset.first(max_samples)
    dataset.identity = identity(whole_key, tokenizer)
    return dataset
