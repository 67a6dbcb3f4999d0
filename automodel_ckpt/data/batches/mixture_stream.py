"""A weighted mixture of streams, read in turns in proportion to their shares, with an exact state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from automodel_ckpt.data.batches.sampler import derive_seed, permutation
from automodel_ckpt.errors import RecipeError


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
    """Iterates over several streams with states, such as those of ``streaming: true``.

    The next sample comes from the stream that is furthest behind its share, so that the numbers of samples differ from
    the shares by less than one per stream, at any time. An epoch has *num_samples* samples; without, it ends when the
    stream whose turn it is has no further sample. A stream that ended begins again with another order, also one whose
    last sample was the last of the epoch before; the others continue where they were. The state is those of the streams
    and the numbers of samples read.
    """

    def __init__(
        self, sources: Mapping[str, Any], shares: Mapping[str, Fraction], num_samples: int | None
    ) -> None:
        self.sources = dict(sources)
        self.shares = {name: shares[name] for name in sources}
        self.num_samples = num_samples
        self._num_read = dict.fromkeys(self.sources, 0)
        self._passes = dict.fromkeys(self.sources, 0)
        self._read_in_epoch = 0
        self._begun = set[str]()
        """The streams of which the epoch has a sample."""
        self._order = (0, False)

    @property
    def identity(self) -> str | None:
        """A digest that changes with the samples, as far as is known; None if that of a stream is unknown."""
        parts = [f"{self.num_samples}"]
        for name, source in self.sources.items():
            known = getattr(source, "identity", None)
            if known is None:
                return None
            parts.append(f"{name} {known} {self.shares[name]}")
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()

    def set_order(self, seed: int, epoch: int, *, shuffle: bool) -> None:
        """Set the order of each stream: a function of *seed*, *shuffle* and the number of its pass, not of *epoch*."""
        self._order = (seed, shuffle)

    def __iter__(self) -> Iterator[MixedRow]:
        streams = {name: self._open(name) for name in self.sources}
        while self.num_samples is None or self._read_in_epoch < self.num_samples:
            name = self._next_name()
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
            self._num_read[name] += 1
            self._read_in_epoch += 1
            self._begun.add(name)
            yield MixedRow(name, sample)
        if not self._read_in_epoch:
            raise _empty(self._next_name())
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

    def state_dict(self) -> dict[str, Any]:
        return {
            "sources": {name: source.state_dict() for name, source in self.sources.items()},
            "num_read": dict(self._num_read),
            "passes": dict(self._passes),
            "read_in_epoch": self._read_in_epoch,
            "begun": [name for name in self.sources if name in self._begun],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises :class:`RecipeError` if it is of other streams."""
        if state["sources"].keys() != self.sources.keys():
            raise RecipeError(
                "the mixture has other sources than the checkpoint",
                where="dataset.sources",
                value=f"{', '.join(self.sources)}; checkpoint: {', '.join(state['sources'])}",
                hint="use the same sources, or start another run with init_from",
            )
        for name, source in self.sources.items():
            source.load_state_dict(state["sources"][name])
        self._num_read = {name: state["num_read"][name] for name in self.sources}
        self._passes = {name: state["passes"][name] for name in self.sources}
        self._read_in_epoch = state["read_in_epoch"]
        # Earlier versions did not save it. There, every stream counts as begun within an epoch.
        is_within = self._read_in_epoch > 0
        self._begun = set(state.get("begun", self.sources if is_within else ()))

    def _open(self, name: str) -> Iterator[Any]:
        source = self.sources[name]
        seed, shuffle = self._order
        number = list(self.sources).index(name)
        if hasattr(source, "set_order"):
            source.set_order(derive_seed(seed, number), self._passes[name], shuffle=shuffle)
        return iter(source)

    def _next_name(self) -> str:
        """The stream that is furthest behind its share of the next sample; of equal ones, the first."""
        total = sum(self._num_read.values()) + 1
        return max(self.sources, key=lambda name: self.shares[name] * total - self._num_read[name])


def _empty(name: str) -> RecipeError:
    return RecipeError(
        "a source of a mixture has no sample",
        where=f"dataset.sources.{name}",
        value="0 samples",
        hint="check its path and filters, or remove it",
    )
