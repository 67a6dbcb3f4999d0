"""A cache of what a teacher predicts: the most probable tokens at each labeled position of a data set, by sample.

A cache is a directory with a directory for each part of the samples, which different ranks write, and a manifest with
the sizes and digests of their files. It is written under a temporary name and renamed when everything is on disk, so a
directory with the final name is complete. A sample is found by its number in the data set, so the order of training
does not matter, and a checksum of its tokens shows whether it is still the sample that the teacher saw.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import uuid
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from automodel_ckpt.base.durable_io import flock, fsync_directory, fsync_file, replace_file
from automodel_ckpt.data.batches.micro_batches import read_sample
from automodel_ckpt.data.collate import IGNORE_INDEX, Batch, Item, Tensors
from automodel_ckpt.data.samples.tokenized import SampleArrays, mapped_array
from automodel_ckpt.errors import RecipeError

log = logging.getLogger("automodel_ckpt")

MANIFEST = "manifest.json"
_FORMAT = 3
_LOCK = "lock"
_ARRAYS = {"tokens": "<i4", "log_probs": "<f4", "rest": "<f4", "counts": "<i8", "checksums": "<i8"}
"""The files of a part -> the types of their numbers. The last two have one for each sample."""
_LARGEST_MANIFEST = 2**24
"""Bytes. A manifest has a few hundred bytes for each rank that wrote a part."""
TOKENS, LOG_PROBS, REST = "teacher_tokens", "teacher_log_probs", "teacher_rest"
"""Keys of a micro-batch: int64 [N, k], float32 [N, k] and float32 [N], for the N labels of its samples in order."""


class SampleTargets(NamedTuple):
    """What a teacher predicts for the labels of one sample, in order, and the checksum of the sample."""

    tokens: npt.NDArray[np.int32]
    """The k most probable tokens [n, k]."""
    log_probs: npt.NDArray[np.float32]
    """Their log-probabilities [n, k]."""
    rest: npt.NDArray[np.float32]
    """The logarithm [n] of the probability of all other tokens."""
    checksum: int


class Targeted(NamedTuple):
    """A sample of a data set with what a teacher predicts for its labels."""

    sample: Any
    targets: SampleTargets


def checksum(sample: Item) -> int:
    """Compute a checksum of the tokens and labels of a sample (CRC-32)."""
    found = 0
    for name in ("input_ids", "labels"):
        values = np.ascontiguousarray(sample[name], dtype=np.int64)
        found = zlib.crc32(values.tobytes(), found)
    return found


def num_labels(sample: Item) -> int:
    """Count the labels of a sample that are predicted: all but -100 and the first token's."""
    labels = np.asarray(sample["labels"], dtype=np.int64)
    return int(np.count_nonzero(labels[1:] != IGNORE_INDEX))


def data_digest(dataset: Any) -> str:
    """Return a digest of a data set and the tokenizer that made it: of its ``identity``, else of all its tokens.

    Raises :class:`AutomodelError` with the location of a sample that cannot be read.
    """
    size = len(dataset)
    known = getattr(dataset, "identity", None)
    if isinstance(known, str):
        # The size of packs is not part of the identity.
        content = f"{known} {size} {getattr(dataset, 'size', None)}".encode()
    else:
        checksums = [checksum(read_sample(dataset, index)) for index in range(size)]
        content = np.array(checksums, "<u4").tobytes()
    return hashlib.blake2b(content, digest_size=12).hexdigest()


# ---------------------------------------------------------------- writing


class PartWriter:
    """Writes the targets of consecutive samples into the files of one part of a cache."""

    def __init__(self, directory: Path, number: int) -> None:
        """*number* is the part's number: the samples of a part follow the samples of the part before."""
        self._directory = directory / f"{number:05d}"
        self._directory.mkdir()
        self._files = [(self._directory / name).open("wb") for name in _ARRAYS]
        self._num_samples = self._top_k = 0

    def add(self, targets: SampleTargets) -> None:
        """Append the *targets* of the next sample."""
        self._num_samples += 1
        _, self._top_k = targets.tokens.shape
        tokens, log_probs, rest, found = targets
        values = (tokens, log_probs, rest, len(rest), found)
        for file, dtype, value in zip(self._files, _ARRAYS.values(), values, strict=True):
            file.write(np.asarray(value, dtype).tobytes())

    def close(self) -> dict[str, Any]:
        """Flush the files to disk, and return the entry of this part for the manifest."""
        entries = {}
        for name, file in zip(_ARRAYS, self._files, strict=True):
            file.close()
            fsync_file(self._directory / name)
            digest = _digest_of(self._directory / name)
            entries[f"{self._directory.name}/{name}"] = {"blake2b": digest}
        fsync_directory(self._directory)
        return {"samples": self._num_samples, "top_k": self._top_k, "files": entries}


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


class Publication:
    """A cache that is being written: its temporary directory, and its rename at the end. Used by one process."""

    def __init__(self, final: Path) -> None:
        """Create the temporary directory next to *final*, and remove temporary directories of killed processes."""
        self.final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        for leftover in final.parent.glob(f".{final.name}.*"):
            _remove_abandoned(leftover)
        self.directory = final.parent / f".{final.name}.{uuid.uuid4().hex}"
        self.directory.mkdir()
        self._lock = (self.directory / _LOCK).open("w")
        # It ends with the process, which shows others that no process writes here any more.
        flock(self._lock.fileno(), waits=True)

    def publish(self, key: str, parts: Sequence[Mapping[str, Any]]) -> None:
        """Write the manifest for *key* and the *parts* in their order, and give the directory its final name."""
        manifest = {"format": _FORMAT, "key": key, "parts": list(parts)}
        replace_file(self.directory / MANIFEST, json.dumps(manifest, indent=1).encode())
        (self.directory / _LOCK).unlink()
        # One that is damaged, or that another run has published meanwhile; ours is complete. Other processes see either
        # all of it or nothing.
        trash = self.final.with_name(f".{self.final.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            self.final.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
        self.directory.rename(self.final)
        fsync_directory(self.final.parent)
        self._lock.close()

    def discard(self) -> None:
        """Remove the temporary directory after a failure."""
        self._lock.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _remove_abandoned(directory: Path) -> None:
    """Remove the temporary directory of a process that has ended."""
    # An OSError: another process is writing it, or just created or published it.
    with contextlib.suppress(OSError), (directory / _LOCK).open() as file:
        flock(file.fileno())
        shutil.rmtree(directory, ignore_errors=True)


# ---------------------------------------------------------------- reading


class TargetCache:
    """The targets of all samples of a data set, read from the files of a cache as they are needed."""

    def __init__(self, directory: Path, parts: Sequence[Mapping[str, Any]]) -> None:
        self.directory = directory
        self.parts = parts
        self._ends = list(accumulate(part["samples"] for part in parts))
        self._opened: dict[int, _Part] = {}

    @classmethod
    def open(cls, directory: Path, key: str) -> TargetCache | None:
        """Open the cache in *directory*.

        Returns None when there is none for *key*. :meth:`damaged_file` checks the files.
        """
        try:
            with (directory / MANIFEST).open("rb") as file:
                manifest = json.loads(file.read(_LARGEST_MANIFEST))
            if manifest["format"] != _FORMAT or manifest["key"] != key:
                return None
            return cls(directory, manifest["parts"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the cache of the teacher's logits is damaged: %s: %s", directory, error)
            return None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def damaged_file(self, number: int = 0, num_ranks: int = 1) -> str | None:
        """Read the files of every *num_ranks*-th part from *number*. Returns None when they are as they were written.

        Otherwise, returns the name of a file that has another digest or cannot be read.
        """
        for part in self.parts[number::num_ranks]:
            for name, entry in part["files"].items():
                found = None
                with contextlib.suppress(OSError):
                    found = _digest_of(self.directory / name)
                if found != entry["blake2b"]:
                    return str(name)
        return None

    def of(self, index: int) -> SampleTargets:
        """The targets of sample *index*, as arrays in mapped files."""
        number = bisect_right(self._ends, index)
        if number not in self._opened:
            directory = self.directory / f"{number:05d}"
            self._opened[number] = _Part(directory, self.parts[number]["top_k"])
        start = self._ends[number] - self.parts[number]["samples"]
        return self._opened[number].of(index - start)


class _Part(SampleArrays):
    """The mapped files of one part."""

    def __init__(self, directory: Path, top_k: int) -> None:
        arrays = (mapped_array(directory / name, dtype) for name, dtype in _ARRAYS.items())
        tokens, log_probs, self._rest, counts, self._checksums = arrays
        self._tokens, self._log_probs = (each.reshape(-1, top_k) for each in (tokens, log_probs))
        self.ends = np.cumsum(counts)

    def of(self, index: int) -> SampleTargets:
        span = self.span(index)
        top = self._tokens[span], self._log_probs[span], self._rest[span]
        return SampleTargets(*top, int(self._checksums[index]))


# ---------------------------------------------------------------- samples


class TargetedDataset:
    """A map-style data set: samples have the teacher's targets in addition to tokens, once :attr:`cache` is set.

    Its samples are the samples of *dataset*; packs count as samples.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.cache: TargetCache | None = None
        """The targets by sample; None: not computed yet, and samples come without them."""

    def __getattr__(self, name: str) -> Any:
        # A copy that is unpickled has no attributes yet.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Sample *index*. Raises :class:`RecipeError` if it is not the one that the teacher saw."""
        sample = self.dataset[index]
        if self.cache is None:
            return sample
        targets = self.cache.of(index)
        if checksum(sample) != targets.checksum:
            raise RecipeError(
                "this sample is not the one whose logits of the teacher are cached",
                where="dataset",
                value=f"sample {index}, {self.cache.directory}",
                hint="use a data set that returns the same samples in every epoch, or remove distill.top_k; if a file "
                "that it reads has changed since, remove that directory",
            )
        return Targeted(sample, targets)


class TargetCollator:
    """Collates samples by another collator, and puts their targets into the micro-batch, sample by sample."""

    def __init__(self, collate_fn: Any) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: Sequence[Any]) -> Batch:
        """Return the micro-batch of *samples*, with the keys TOKENS, LOG_PROBS and REST if the samples have targets.

        Raises :class:`RecipeError` if the collator makes another number of labels than the teacher saw.
        """
        plain = [each.sample if isinstance(each, Targeted) else each for each in samples]
        targets = [each.targets for each in samples if isinstance(each, Targeted)]
        batch: Batch = dict(self.collate_fn(plain))
        if targets:
            tokens, log_probs, rest, _ = zip(*targets, strict=True)
            batch[TOKENS] = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
            batch[LOG_PROBS] = torch.from_numpy(np.concatenate(log_probs))
            batch[REST] = torch.from_numpy(np.concatenate(rest))
            require_labels(batch, len(batch[TOKENS]))
        return batch


def require_labels(micro_batch: Tensors, expected: int) -> None:
    """Raise :class:`RecipeError` unless the rows of *micro_batch* have so many predicted labels."""
    found = int(torch.count_nonzero(micro_batch["labels"][:, 1:] != IGNORE_INDEX))
    if found != expected:
        raise RecipeError(
            "the collate function changes the labels of samples, so the teacher's logits cannot be cached",
            where="dataloader.collate_fn",
            value=f"{found} labels in a micro-batch of samples with {expected}",
            hint="remove collate_fn, or distill.top_k",
        )


def share_of(num_samples: int, number: int, num_parts: int) -> range:
    """The samples of part *number* of *num_parts*: consecutive ones, the parts as equal as possible."""
    start = number * num_samples // num_parts
    return range(start, (number + 1) * num_samples // num_parts)


def batches_of(samples: range, size: int, count: int, num_samples: int) -> Iterator[list[int]]:
    """Yield *count* lists of at most *size* sample numbers, *samples* first; the rest are lists of a filler.

    All ranks need the same number of forward passes. The filler is the last sample of *num_samples*.
    """
    for number in range(count):
        start = number * size
        part = samples[start : start + size]
        yield list(part) if part else [num_samples - 1]
