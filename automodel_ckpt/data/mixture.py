"""A weighted mixture of data sets: each epoch has an exact number of samples of each.

An epoch of N samples has N times the weight's share of each source, rounded by the largest remainders. Over the epochs,
every sample of a source is used once before any is used again. Which samples an epoch has is a function of the seed
and the epoch, so it does not depend on the number of ranks or workers, and a resume continues exactly.

Streams are read in turns in proportion to their shares, with an exact state.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import ConcatDataset, IterableDataset

from automodel_ckpt.data.batches.micro_batches import derive_seed, permutation
from automodel_ckpt.data.batches.stream_batches import restores_exactly
from automodel_ckpt.data.collate import OTHER_RUN, Integers, State, require_index, require_range
from automodel_ckpt.errors import RecipeError

log = logging.getLogger(__name__)

Shares = Mapping[str, Fraction]
Sources = Mapping[str, Any]
"""Data sets by their names in a mixture."""


def joint_identity(
    parts: Sequence[str], sources: Sources, details: Mapping[str, object]
) -> str | None:
    """A digest that changes with *parts*, and the samples and *details* of *sources*.

    Returns None when one is unknown.
    """
    parts = list(parts)
    for name, source in sources.items():
        known = getattr(source, "identity", None)
        if known is None:
            return None
        parts.append(f"{name} {known} {details[name]}")
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()


def check_same_sources(saved: Sources, sources: Sources) -> None:
    """Raise :class:`RecipeError` unless a checkpoint has the state of these *sources*."""
    if saved.keys() != sources.keys():
        raise RecipeError(
            "the mixture has other sources than the checkpoint",
            where="dataset.sources",
            value=f"{', '.join(sources)}; checkpoint: {', '.join(saved)}",
            hint=OTHER_RUN,
        )


class Turns:
    """Which source each sample is of: the one that is furthest behind its share; of equal ones, the first.

    *counts* are the samples of each source so far.
    """

    def __init__(self, shares: Shares, counts: Mapping[str, int]) -> None:
        # Integers, because sums of fractions are slow, and floats would depend on the order of additions.
        self._scale = math.lcm(*(share.denominator for share in shares.values()))
        self._shares = {name: int(share * self._scale) for name, share in shares.items()}
        self.counts = {name: counts[name] for name in shares}

    def next_name(self) -> str:
        """The source of the next sample."""
        total = sum(self.counts.values()) + 1
        behind = {}
        for name, share in self._shares.items():
            behind[name] = share * total - self.counts[name] * self._scale
        return max(behind, key=behind.__getitem__)


class MixedRow(NamedTuple):
    """A sample of a stream, and the name of the stream."""

    source: str
    sample: Any


class IndexedStream(IterableDataset[Any]):
    """Iterates over a map-style *dataset* in the order of :meth:`set_order`; its state is a position."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.identity = getattr(dataset, "identity", None)
        self._position = 0
        self._order = (0, 0, False)

    def set_order(self, seed: int, epoch: int, *, shuffle: bool) -> None:
        """Set the order: a function of *seed*, *epoch* and *shuffle*."""
        self._order = (seed, epoch, shuffle)

    def __iter__(self) -> Iterator[Any]:
        order = permutation(len(self.dataset), *self._order).tolist()
        while self._position < len(order):
            # Counted before the yield: a state that is saved during it is the state after this sample.
            self._position += 1
            yield self.dataset[order[self._position - 1]]
        self._position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]


class MixtureStream(IterableDataset[MixedRow]):
    """Iterates over several streams with states, such as streams of ``streaming: true``.

    The next sample comes from the stream that is furthest behind its share, so that the numbers of samples differ from
    the shares by less than one per stream, at any time. An epoch has *num_samples* samples; without, it ends when the
    next sample should come from a stream that has no further one. A stream that ended begins again with another order,
    also if its last sample was the last of the epoch before. The others continue where they were. The state contains
    the states of the streams and the numbers of samples read.
    """

    def __init__(self, sources: Sources, shares: Shares, num_samples: int | None) -> None:
        self.sources = dict(sources)
        self.shares = {name: shares[name] for name in sources}
        self.num_samples = num_samples
        self._turns = Turns(self.shares, dict.fromkeys(sources, 0))
        self._passes = dict.fromkeys(self.sources, 0)
        self._read_in_epoch = 0
        self._begun = set[str]()
        """The streams of which the epoch has a sample."""
        self._order = (0, False)

    @property
    def identity(self) -> str | None:
        """A digest that changes with the samples, as far as is known. None when a stream's digest is unknown."""
        return joint_identity([f"{self.num_samples}"], self.sources, self.shares)

    def set_order(self, seed: int, epoch: int, *, shuffle: bool) -> None:
        """Set the order of each stream: a function of *seed*, *shuffle* and the number of its pass, not of *epoch*."""
        self._order = (seed, shuffle)

    def __iter__(self) -> Iterator[MixedRow]:
        streams = {name: self._open(name) for name in self.sources}
        while self.num_samples is None or self._read_in_epoch < self.num_samples:
            name = self._turns.next_name()
            sample = next(streams[name], None)
            if sample is None:
                self._passes[name] += 1
                # A stream that has no sample in this epoch was at its end before: it does not end the epoch.
                if self.num_samples is None and name in self._begun:
                    break
                streams[name] = self._open(name)
                sample = next(streams[name], None)
                if sample is None:
                    raise _empty(name)
            # Counted before the yield: a state that is saved during it is the state after this sample.
            self._turns.counts[name] += 1
            self._read_in_epoch += 1
            self._begun.add(name)
            yield MixedRow(name, sample)
        if not self._read_in_epoch:
            raise _empty(self._turns.next_name())
        self._read_in_epoch = 0
        self._begun = set()

    def prepare(self, row: MixedRow) -> Any:
        """Make a sample of a row, as its stream does."""
        prepare = getattr(self.sources[row.source], "prepare", None)
        return row.sample if prepare is None else prepare(row.sample)

    def report(self) -> None:
        """Log what each stream reports about the samples that this rank prepared."""
        for source in self.sources.values():
            report = getattr(source, "report", None)
            if report is not None:
                report()

    def state_dict(self) -> State:
        return {
            "sources": {name: source.state_dict() for name, source in self.sources.items()},
            "num_read": dict(self._turns.counts),
            "passes": dict(self._passes),
            "read_in_epoch": self._read_in_epoch,
            "begun": [name for name in self.sources if name in self._begun],
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. Raises :class:`RecipeError` if it is of other streams."""
        check_same_sources(state["sources"], self.sources)
        for name, source in self.sources.items():
            source.load_state_dict(state["sources"][name])
        self._turns = Turns(self.shares, state["num_read"])
        self._passes = {name: state["passes"][name] for name in self.sources}
        self._read_in_epoch = state["read_in_epoch"]
        self._begun = set(state["begun"])

    def _open(self, name: str) -> Iterator[Any]:
        source = self.sources[name]
        seed, shuffle = self._order
        number = list(self.sources).index(name)
        if hasattr(source, "set_order"):
            source.set_order(derive_seed(seed, number), self._passes[name], shuffle=shuffle)
        return iter(source)


def _empty(name: str) -> RecipeError:
    return RecipeError(
        "a source of a mixture has no sample",
        where=f"dataset.sources.{name}",
        value="0 samples",
        hint="check its path and filters, give it a larger weight or dataset.num_samples, or remove it",
    )


class MixtureDataset:
    """A map-style data set of the samples of several *sources*, of which an epoch uses *num_of_epoch*.

    Its length is the number of samples of an epoch. Its indices refer to the concatenated sources.
    :meth:`epoch_indices` returns the ones that an epoch uses.
    """

    def __init__(self, sources: Sources, num_of_epoch: Mapping[str, int]) -> None:
        self.sources = dict(sources)
        self.num_of_epoch = {name: num_of_epoch[name] for name in sources}
        self._joined = ConcatDataset[Any](list(sources.values()))

    @property
    def identity(self) -> str | None:
        """A digest that changes with the samples and their numbers. None when a source's digest is unknown."""
        details = {}
        for name, dataset in self.sources.items():
            details[name] = f"{len(dataset)} {self.num_of_epoch[name]}"
        return joint_identity([], self.sources, details)

    def __len__(self) -> int:
        return sum(self.num_of_epoch.values())

    def __getitem__(self, index: int) -> Any:
        require_index(index, len(self._joined))
        return self._joined[index]

    def epoch_indices(self, epoch: int, seed: int, *, shuffle: bool) -> Integers:
        """Return the indices that *epoch* uses, int64 of shape [len(self)], with the sources evenly interleaved.

        With *shuffle*, each pass over a source has another order, else the order of the source.
        """
        all_indices = []
        all_positions = []
        start = 0
        for number, (name, dataset) in enumerate(self.sources.items()):
            count = self.num_of_epoch[name]
            source_seed = derive_seed(seed, number)
            indices = _draws(len(dataset), source_seed, epoch * count, count, shuffle)
            all_indices.append(indices + start)
            all_positions.append((np.arange(count) + 0.5) / max(count, 1))
            start += len(dataset)
        # Stable: samples at equal positions are in the order of the sources.
        order = np.argsort(np.concatenate(all_positions), kind="stable")
        return np.concatenate(all_indices)[order]


def _draws(size: int, seed: int, start: int, count: int, shuffle: bool) -> Integers:
    """Return draws number *start* to *start* + *count* of a source of *size* samples, which is read again and again."""
    first_pass, first = divmod(start, size)
    passes = range(first_pass, -(-(start + count) // size))
    # Without a draw, np.concatenate() needs an empty array.
    orders = [np.empty(0, np.int64), *(permutation(size, seed, n, shuffle).numpy() for n in passes)]
    return np.concatenate(orders)[first : first + count]


def mixture(
    sources: dict[str, Any],
    weights: dict[str, float] | None = None,
    num_samples: int | None = None,
) -> MixtureDataset | MixtureStream:
    """Mix data sets: *sources* are sections with ``_target_`` by name, *weights* their shares of the samples.

    Without *weights*, each source is used once per epoch. *num_samples* is the length of an epoch. By default, an epoch
    ends when the first source would repeat a sample; the others continue there in the next epoch. With a larger number,
    sources repeat. Logs how many samples of each source an epoch has. With ``packed_sequence``, each source is packed
    separately, and a pack counts as its samples. Some or all sources may be streams; then *weights* are needed
    (:class:`~automodel_ckpt.data.mixture.MixtureStream`).

    Raises :class:`RecipeError` for empty sources, and for weights that do not fit.
    """
    _check_sources(sources)
    streams = [name for name, each in sources.items() if not hasattr(each, "__len__")]
    if streams and weights is None:
        # The numbers of their samples are unknown.
        raise _unusable_weights(sources, weights)
    sizes = {name: 1 if streams else len(dataset) for name, dataset in sources.items()}
    shares = _shares(sizes, weights)
    if num_samples is None and not streams:
        # After these, the first source would repeat a sample. A share of zero cannot occur.
        num_samples = math.floor(min(sizes[name] / share for name, share in shares.items()))
    if num_samples is not None:
        require_range("num_samples", num_samples, 1)
    if streams:
        for name, share in shares.items():
            log.info("mixture: %.4g of the samples are of %s", float(share), name)
        each_stream = {}
        for name, each in sources.items():
            each_stream[name] = each if name in streams else IndexedStream(each)
        return MixtureStream(each_stream, shares, num_samples)
    assert num_samples is not None
    counts = _apportioned(shares, num_samples)
    for name, count in counts.items():
        if count == 0:
            raise _empty(name)
        log.info(
            "mixture: an epoch of %d samples has %d of %s, %.3g of its %d samples",
            *(num_samples, count, name, count / sizes[name], sizes[name]),
        )
    return MixtureDataset(sources, counts)


def for_each_source(dataset: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``change(dataset)``, or for a mixture the mixture of its changed sources.

    An epoch uses the same fractions of them: packing changes the number of samples of each source.
    """
    if not isinstance(dataset, MixtureDataset):
        return change(dataset)
    changed = {name: change(source) for name, source in dataset.sources.items()}
    counts = {}
    for name, source in dataset.sources.items():
        fraction = Fraction(dataset.num_of_epoch[name], len(source))
        counts[name] = max(round(fraction * len(changed[name])), 1)
    return MixtureDataset(changed, counts)


def _check_sources(sources: Sources) -> None:
    if not isinstance(sources, Mapping) or not sources:
        raise _unusable_source("a mixture needs sources", "dataset.sources", str(sources)[:80])
    for name, dataset in sources.items():
        # Not by __getitem__, which torch's IterableDataset has, too.
        if hasattr(dataset, "__len__"):
            if len(dataset) == 0:
                raise _empty(name)
        elif not restores_exactly(dataset):
            what = "a source of a mixture has no length and no state"
            raise _unusable_source(what, f"dataset.sources.{name}", type(dataset).__name__)


def _unusable_source(what: str, where: str, value: str) -> RecipeError:
    hint = "give sections with _target_ of data sets with a length, or of streams with a state, by name"
    return RecipeError(what, where=where, value=value, hint=hint)


def _shares(sizes: Mapping[str, int], weights: Mapping[str, float] | None) -> dict[str, Fraction]:
    """Return each source's share of the samples; the shares add up to 1."""
    weights = sizes if weights is None else weights
    are_positive = all(0 < weight < math.inf for weight in weights.values())
    if weights.keys() != sizes.keys() or not are_positive:
        raise _unusable_weights(sizes, weights)
    # Fractions: the numbers of samples must not depend on the order of a sum.
    total = sum(Fraction(weight) for weight in weights.values())
    return {name: Fraction(weights[name]) / total for name in sizes}


def _unusable_weights(sources: Sources, weights: Mapping[str, float] | None) -> RecipeError:
    return RecipeError(
        "a mixture needs a positive weight for each source, unless no source is a stream",
        where="dataset.weights",
        value=weights,
        hint="",
    )


def _apportioned(shares: Shares, total: int) -> dict[str, int]:
    """Divide *total* by *shares*; those with the largest remainders are rounded up."""
    counts = {name: math.floor(share * total) for name, share in shares.items()}
    missing = total - sum(counts.values())
    # Stable: among equal remainders, the first sources are rounded up.
    by_remainder = sorted(shares, key=lambda name: counts[name] - shares[name] * total)
    for name in by_remainder[:missing]:
        counts[name] += 1
    return counts
