"""From a source and a way to tokenize its rows to a data set: prepared once and kept, or read as a stream."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.encode import Truncation, identity, prepared
from automodel_ckpt.data.rowstream import Encode, RowStream, row_stream
from automodel_ckpt.data.source import Source
from automodel_ckpt.data.tokenized import TokenizedDataset


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
) -> TokenizedDataset | RowStream:
    """The samples that *encode* makes of the rows of *source*, cut by *policy*, and *max_samples* of them at most.

    They are kept in the cache under *key*: the builder's name, and what they depend on beside the others. With
    *streaming* nothing is kept: rows are read and tokenized while they are used, in the order of the source, or
    (``dataloader.shuffle``) shuffled within blocks of *shuffle_block* rows.
    """
    policy_key = (*key, policy.seq_length, policy.policy)
    if streaming:
        stream = row_stream(source, encode, policy, block=shuffle_block, max_samples=max_samples)
        stream.identity = identity((source.outline(), *policy_key), tokenizer)
        return stream

    def build() -> TokenizedDataset:
        return policy.apply_to_all(encode(source), source.place)

    whole_key = (source.fingerprint(), *policy_key)
    dataset = prepared(str(key[0]), whole_key, tokenizer, build)
    dataset.tell_truncation(source.path, policy.policy, policy.seq_length)
    dataset = dataset.first(max_samples)
    dataset.identity = identity(whole_key, tokenizer)
    return dataset
