"""Make a data set of a source and a function that tokenizes its rows: prepared once and cached, or a stream."""

from __future__ import annotations

import copy
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Unpack

import tokenizers
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from automodel_ckpt.base.durable_io import flock, fsync_file, unlock
from automodel_ckpt.base.store_url import cache_directory
from automodel_ckpt.data.batches.micro_batches import derive_seed, permutation
from automodel_ckpt.data.collate import (
    IGNORE_INDEX,
    ROW_DEFAULTS,
    Item,
    Key,
    RowOptions,
    State,
    at_most,
    require_range,
)
from automodel_ckpt.data.rows.preparation import Encode, prepare
from automodel_ckpt.data.rows.rows import ColumnRows, Rows
from automodel_ckpt.data.rows.source import Source
from automodel_ckpt.data.samples.tokenized import TokenizedDataset, Truncation, report_counts
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """A row as it was read, its number from 0 in the stream, and its file and line if they are known."""

    number: int
    content: Item
    place: str | None = None


class RowStream(IterableDataset[Row]):
    """Iterates over at most *max_samples* rows of *source*, shuffled within blocks of *block* rows; its state is exact.

    Logs how samples that are too long are handled, because their number is not known in advance.

    The state is the state of :attr:`rows` at the start of the block and the number of rows yielded since. So a resume
    reads less than one block again, and continues in the same order. :meth:`prepare` tokenizes a row; each rank calls
    it only for its own part of the stream. Raises :class:`RecipeError` if *block* is less than 1.
    """

    identity: str | None = None
    """A digest that changes with the samples, as far as is known without reading them. None when unknown."""
    template: str | None = None
    """How conversations are rendered, in words; None for other samples."""

    def __init__(
        self,
        source: Source,
        encode: Encode,
        policy: Truncation,
        block: int,
        max_samples: int | None,
        kind: type[TokenizedDataset] = TokenizedDataset,
    ) -> None:
        require_range("shuffle_block", block, 1)
        self.rows: Any = source.stream()
        if max_samples is not None:
            self.rows = self.rows.take(at_most(max_samples, max_samples))
        self.encode, self.policy, self.source = encode, policy, source
        self.block, self.kind = block, kind
        rows = self.rows.state_dict()
        self._start: State = {"rows": rows, "first": 0, "given": 0, "block": block}
        self._state = dict(self._start)
        self.set_order(0, 0, shuffle=False)
        if policy.limit is not None:
            log.info(
                "streaming %s: samples of more than %d tokens are handled when they are read (truncation: %s); their "
                "number is not known in advance",
                *(source.path, policy.seq_length, policy.policy),
            )

    def set_order(self, seed: int, epoch: int, *, shuffle: bool) -> None:
        """Set the order of the rows in each block: a function of *seed*, *epoch*, *shuffle* and the block."""
        self._order = (seed, epoch, shuffle)

    def __iter__(self) -> Iterator[Row]:
        state = self._state
        # Copied, because the source may change the dictionary that it loads.
        self.rows.load_state_dict(copy.deepcopy(state["rows"]))
        rows = iter(self.rows)
        while block := list(islice(rows, state["block"])):
            seed, epoch, shuffle = self._order
            # Seeded by the block's first row, so that a resume needs no earlier block.
            seed = derive_seed(seed, state["first"])
            order = permutation(len(block), seed, epoch, shuffle).tolist()
            next_start = copy.deepcopy(self.rows.state_dict())
            while state["given"] < len(block):
                number = order[state["given"]]
                # Counted before the yield: a state that is saved during it is the state after this row.
                state["given"] += 1
                content, place = block[number]
                yield Row(state["first"] + number, content, place)
            first = state["first"] + len(block)
            state.update(rows=next_start, first=first, given=0, block=self.block)
        self._state = dict(self._start)

    def prepare(self, row: Row) -> Any:
        """Tokenize a row, truncated to seq_length, and make an item of it as *kind* does.

        If truncation leaves no label, all labels are -100. With the policy ``error``, raises :class:`RecipeError` for a
        sample that is too long.
        """
        place = row.place or f"{self.source.path}, row {row.number}"
        table = ColumnRows.of(self.source.path, [(row.content, place)], self.rows)
        samples = self.encode(table)
        kept = self.policy.apply(samples, lambda: table.place(0))
        items = []
        for sample in kept or samples:
            tokens, flags = sample.tokens, sample.labelled
            if not kept:
                # A stream cannot skip a sample: the number of the samples after it is part of the data order.
                tokens = tokens[: self.policy.seq_length]
                flags = [False] * len(tokens)
            pairs = zip(tokens, flags, strict=True)
            labels = [token if is_labeled else IGNORE_INDEX for token, is_labeled in pairs]
            items.append({"input_ids": tokens, "labels": labels})
        return self.kind.item(items, samples[0].number, self.policy.limit)

    def report(self) -> None:
        """Log how many samples were truncated or have an empty completion since the last call."""
        what = f"{self.source.path}, as far as this rank read it"
        report_counts(what, self.policy.counts, f"seq_length {self.policy.seq_length}")
        self.policy = replace(self.policy)

    def state_dict(self) -> State:
        return dict(self._state)

    def load_state_dict(self, state: State) -> None:
        # The interrupted block keeps its size, also if the recipe's shuffle_block has changed.
        self._state = dict(state)


TextDataset = TokenizedDataset | RowStream
"""Samples that are prepared, or streamed."""

_FORMAT = 12
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
    max_samples = given["max_samples"]
    source = Source.of(path, given["name"], given["split"], given["revision"])
    if not given["streaming"]:
        return samples_of_rows(
            source,
            source.fingerprint(),
            tokenizer,
            encode,
            policy,
            key=key,
            max_samples=max_samples,
            fields=fields,
            template=template,
            kind=kind,
        )
    stream = RowStream(source, encode, policy, given["shuffle_block"], max_samples, kind)
    stream.template = template
    # Names and sizes only: a digest of the content would read all files before the first step.
    whole_key = (source.files_signature(), *key, policy.seq_length, policy.policy)
    stream.identity = identity(whole_key, tokenizer)
    return stream


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
        log.debug("preparing %s; later starts read the result from the cache", rows.path)
        prepare(rows, encode, policy, directory, kind.group_size)
        unused = [name for name in rows.fields if fields is not None and name not in fields]
        if unused:
            log.info("%s: unused fields: %s", rows.path, ", ".join(unused))

    # Without max_samples: the cache has all samples, of which first() takes some.
    whole_key = (fingerprint, *key, policy.seq_length, policy.policy)
    digest = _fingerprint(tokenizer)
    if digest is None:
        # A slow tokenizer has no digest of its content, so the cache is not used for it.
        with TemporaryDirectory() as scratch:
            build(Path(scratch))
            # Mapped files keep their content after their removal.
            dataset = kind(Path(scratch))
    else:
        cache_key = (_FORMAT, *whole_key, digest, tokenizers.__version__)
        dataset = kind(cached(str(key[0]), cache_key, build))
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


def cached(name: str, key: Key, build: Callable[[Path], None]) -> Path:
    """Return the directory that *build* filled for *key*, and build it first if it does not exist.

    *key* has to contain everything that the content depends on; its repr is hashed. The directory is published under
    its name only after all files are flushed to disk. Other processes that need it wait meanwhile. Raises
    :class:`RecipeError` if the cache cannot be written.
    """
    # A repr with an address, such as a function's repr, would be another key in every process.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
    try:
        final = cache_directory() / f"{name}-{digest}"
        # Without the lock: the rename publishes a complete directory, so its name is proof.
        if final.is_dir():
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        # Never remove the lock file: a process could lock a new file while another one holds the
        # old one.
        with _locked(final.with_name(f".{final.name}.lock")):
            # Another process may have built it while this one waited for the lock.
            if not final.is_dir():
                _build(final, build)
    except OSError as error:
        hint = "set the environment variable AUTOMODEL_CKPT_CACHE to a writable directory with enough free space"
        raise RecipeError.of_system(error, "prepared data cannot be stored", hint=hint) from error
    return final


def _build(final: Path, build: Callable[[Path], None]) -> None:
    partial = final.with_name(f".{final.name}.partial")
    # The name is the same in every process: only the holder of the lock may remove leftovers.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        for path in partial.iterdir():
            fsync_file(path)
        # The parent is not flushed: if a power failure undoes the rename, the data is built again.
        partial.rename(final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # Errors of write(), such as the error for a full disk, do not contain a path.
        if isinstance(error, OSError) and not error.filename:
            error.filename = str(final.parent)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on *path*.

    The lock ends with the process, so a killed process blocks no other one. A process that waits logs it: the owner may
    be suspended, or on another host that shares the cache.
    """
    with path.open("w") as file:
        try:
            flock(file.fileno())
        except BlockingIOError:
            log.info(
                "waiting until another process has prepared the same data; it holds the lock %s",
                path,
            )
            flock(file.fileno(), waits=True)
        try:
            yield
        finally:
            unlock(file.fileno())
