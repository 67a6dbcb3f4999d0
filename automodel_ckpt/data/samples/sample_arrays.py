"""Samples of different lengths in flat arrays, which are files of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt


class SampleArrays:
    """Samples that are concatenated: sample i has the elements ``ends[i - 1]`` to ``ends[i]`` of the long arrays.

    A subclass names its attributes with arrays in :attr:`array_names`, in the order of the arguments of its class.
    """

    array_names: ClassVar[Sequence[str]]
    ends: npt.NDArray[np.int64]

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Load the samples that :meth:`save` wrote; the arrays are memory-mapped."""
        return cls(*cls.mapped_arrays(directory))

    @classmethod
    def mapped_arrays(cls, directory: Path) -> list[npt.NDArray[Any]]:
        """Map the arrays of :attr:`array_names` in a directory."""
        arrays: list[npt.NDArray[Any]] = []
        for name in cls.array_names:
            # np.load rejects pickled objects by default: a cache that others can write must not run code.
            mapped = np.load(directory / f"{name}.npy", mmap_mode="r")
            # A plain array over the mapping: numpy's memmap class takes ten times as long to slice.
            arrays.append(np.asarray(mapped))
        return arrays

    def save(self, directory: Path) -> None:
        """Write the arrays as ``.npy`` files into an existing directory."""
        for name in self.array_names:
            np.save(directory / f"{name}.npy", getattr(self, name))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of elements of each sample."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    def span(self, index: int) -> slice:
        """The elements of sample *index*. Raises IndexError if there is none with this index."""
        # IndexError also ends an iteration over a class without __iter__.
        if not 0 <= index < len(self.ends):
            raise IndexError(index)
        start = int(self.ends[index - 1]) if index else 0
        return slice(start, int(self.ends[index]))
