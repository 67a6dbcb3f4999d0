"""Make a data set of a source and a function that tokenizes its rows: prepared once and cached, or a stream."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

import tokenizers
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.collate import Key
from automodel_ckpt.data.rows.arguments import ROW_DEFAULTS, RowOptions
from automodel_ckpt.data.rows.cache import cached
from automodel_ckpt.data.rows.preparation import Encode, prepare
from automodel_ckpt.data.rows.row_stream import RowStream
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.tokenized import TokenizedDataset, Truncation

log = logging.getLogger(__name__)

TextDataset = TokenizedDataset | RowStream
"""Samples that are prepared, or streamed."""

_FORMAT = 11
"""Part of the cache's keys. Increase it when the samples of the same data change."""


def samples_of(
    path: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    encode: Encode,
    policy: Truncation,
    *,
    key: Key,
    fields: Sequence[str] | None = None,
    template: str | None = None,
    kind: type[TokenizedDataset] = TokenizedDataset,
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Tokenize the rows of *path* with *encode*, and truncate the samples by *policy*.

    They are cached under *key*: the builder's name, and everything that the samples depend on besides the other
    arguments. *template* describes how conversations are rendered. When the samples are prepared, the fields of the
    data that are not in *fields* are logged as unused. With ``streaming``, nothing is cached: rows are read and
    tokenized during training, in the order of the source or (``dataloader.shuffle``) shuffled within blocks of
    ``shuffle_block`` rows. *kind* makes the items of the samples of a row. Raises :class:`RecipeError` for data that
    cannot be read or tokenized.
    """
    given = ROW_DEFAULTS | options
    source = Source.of(path, given["name"], given["split"], given["revision"])
    if given["streaming"]:
        stream = RowStream(
            source,
            encode,
            policy,
            block=given["shuffle_block"],
            max_samples=given["max_samples"],
            kind=kind,
        )
        stream.template = template
        # Names and sizes only: a digest of the content would read all files before the first step.
        stream.identity = identity(
            (source.files_signature(), *key, policy.seq_length, policy.policy), tokenizer
        )
        return stream

    return samples_of_rows(
        source,
        source.fingerprint(),
        tokenizer,
        encode,
        policy,
        key=key,
        max_samples=given["max_samples"],
        fields=fields,
        template=template,
        kind=kind,
    )


def samples_of_rows(
    rows: Rows,
    fingerprint: str,
    tokenizer: PreTrainedTokenizerBase,
    encode: Encode,
    policy: Truncation,
    *,
    key: Key,
    max_samples: int | None,
    fields: Sequence[str] | None = None,
    template: str | None = None,
    kind: type[TokenizedDataset] = TokenizedDataset,
) -> TokenizedDataset:
    """Tokenize *rows*, as :func:`samples_of` does without *streaming*; *fingerprint* changes with their content."""

    def build(directory: Path) -> None:
        log.info("preparing the data of %s; later starts read the result from the cache", key[0])
        prepare(rows, encode, policy, directory, kind.group_size)
        unused = [name for name in rows.fields if fields is not None and name not in fields]
        if unused:
            log.info("%s: unused fields: %s", rows.path, ", ".join(unused))

    # Without max_samples: the cache has all samples, of which first() takes some.
    whole_key = (fingerprint, *key, policy.seq_length, policy.policy)
    digest = _fingerprint(tokenizer)
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        if digest is None:
            # A slow tokenizer has no digest of its content, so the cache is not used for it.
            build(directory)
        else:
            cache_key = (_FORMAT, *whole_key, digest, tokenizers.__version__)
            directory = cached(str(key[0]), cache_key, build)
        # Mapped files keep their content after their removal.
        dataset = kind.load(directory)
    dataset = dataset.reported(rows.path, policy.seq_length, max_samples)
    dataset.template = template
    dataset.limit = policy.limit
    dataset.identity = identity(whole_key, tokenizer)
    return dataset


def identity(key: Key, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of *key* and the tokenizer. *key* contains everything else that the samples depend on."""
    whole_key = repr((key, _fingerprint(tokenizer)))
    return hashlib.blake2b(whole_key.encode(), digest_size=12).hexdigest()


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return None
    # A call disables truncation and padding, which tokenizer.json or an earlier call may have enabled. They are not
    # part of the samples, and would differ between the rank that prepares these and the others.
    tokenizer(["a"], add_special_tokens=False, verbose=False)
    # The serialized backend does not contain which tokens are bos and eos.
    special = f"{tokenizer.bos_token_id} {tokenizer.eos_token_id}"
    content = special + backend.to_str()
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
