"""The interface of an external format: what a module of this package implements. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from automodel_ckpt.checkpoint.files.type_aliases import Shape, Strings, Values
from automodel_ckpt.checkpoint.parts.slices import TensorMap
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
from automodel_ckpt.errors import unusable


@dataclass(frozen=True)
class ModelParameter:
    """A parameter of a model: its name, its shape, and whether weight decay usually applies to it (no norm or bias)."""

    name: str
    shape: Shape
    decays: bool


Parameters = Callable[[], Sequence[ModelParameter]]
"""Returns the model's parameters in the order of ``named_parameters()``, each tied parameter once.

The command that imports passes it: building the model without memory needs torch and transformers. A format calls it
only if its files number the parameters instead of naming them.
"""


@dataclass(frozen=True)
class ParameterGroup:
    """The names of an optimizer's parameters with the same options, such as ``lr``, ``betas`` and ``weight_decay``."""

    parameters: Strings
    options: Values


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer.

    *tensors* maps the name of a parameter to its tensors by entry, for example ``exp_avg`` and ``exp_avg_sq``. They are
    slices of files below *root*. *values* maps it to its numbers by entry, for example ``{"step": 10.0}``. Both have
    the names of the model that the format's ``open()`` returns. Each parameter is in one of the *groups*. A parameter
    that was never updated is in neither mapping. *names_from* states, in words, how parameters that the file numbers
    got their names. Empty if the file names them.
    """

    root: Path
    tensors: Mapping[str, TensorMap]
    values: Mapping[str, Mapping[str, int | float | bool]]
    groups: tuple[ParameterGroup, ...]
    names_from: str = ""


# Counters below this are exact in all numbers of a run.
_MAX_COUNT = 2**53


@dataclass(frozen=True)
class Counters:
    """What a checkpoint states about its position in a run, as its program counts. None for what it does not state."""

    step: int | None = None
    epoch: int | None = None
    consumed_samples: int | None = None

    @staticmethod
    def of(*stated: object) -> Counters:
        """Return counters from values that may be anything."""
        # Not isinstance: True is an int, too.
        return Counters(
            *(each if type(each) is int and 0 <= each < _MAX_COUNT else None for each in stated)
        )


@dataclass(frozen=True)
class TrainingState(Counters):
    """What a checkpoint states about its training run. A field is None when the checkpoint does not state it.

    *step* counts optimizer steps, *epoch* finished epochs, and *consumed_samples* the samples of all ranks. *scheduler*
    has the plain values of the LR scheduler's ``state_dict()``. *omitted* names, in words, what is not transferred.
    """

    optimizer: OptimizerState | None = None
    scheduler: Values | None = None
    omitted: Strings = ()


@dataclass(frozen=True)
class TensorSummary:
    """A tensor for display: safetensors dtype code, global shape, and the number of slices that it is stored in."""

    dtype: str
    shape: Shape
    slices: int


@dataclass(frozen=True)
class Inventory:
    """All tensors of a path, by name, and the number of other values (for example the options of an optimizer)."""

    tensors: Mapping[str, TensorSummary]
    num_values: int = 0


Details = Mapping[str, Strings]
"""What ``ckpt show`` prints about a path: lines by section title."""


class Format(ABC):
    """A format in which other programs save models. Instances are listed in ``registry.py``.

    A format describes, and never reads, the data of tensors: :meth:`open` returns a :class:`Source`. Its slices are
    byte ranges of files. Nothing in the files is executed, and a file that is damaged, too large or outside of *path*
    raises :class:`CheckpointUnusable`.
    """

    name: ClassVar[str]
    """The name in reports, for example ``PyTorch DCP``."""
    is_readable: ClassVar[bool] = True
    """False for a format that is only recognized, so that the error can name it and the way to convert it."""

    has_own_config: ClassVar[bool] = False
    """True if a file config.json next to the weights does not describe a Hugging Face model."""

    saves_config: ClassVar[bool] = False
    """True if a file config.json next to the weights describes the module that gave them their names."""

    has_own_names: ClassVar[bool] = False
    """True if tensors have the names of any module that a user's program saved, not only of a known model."""

    def detect(self, path: Path) -> bool:
        """Return whether *path*, which its row in ``registry.py`` matches, has this format.

        By default it has. A directory is only inspected itself, not its subdirectories, unless they are part of the
        format. Returns False if *path* cannot be read.
        """
        return True

    @abstractmethod
    def open(self, path: Path) -> Source:
        """Return the model in *path*: its tensors, tied names, notes for the user, and what is not part of the model.

        Symbolic links are followed where a user may keep files elsewhere, such as the Hub's cache.
        Raises :class:`CheckpointUnusable` if the files are damaged or contradict each other.
        """

    def parts(self, path: Path) -> frozenset[str]:
        """Return the names of the subdirectories that :meth:`open` reads, so that they are not listed next to *path*.

        Only a format with subdirectories that have a format when seen alone overrides this method. Never raises.
        """
        return frozenset()

    def details(self, path: Path) -> Details:
        """Return what else ``ckpt show`` prints about *path*: lines by section title, for example a model's config.

        Raises :class:`CheckpointUnusable` if the files are damaged.
        """
        return {}

    def stored_tensors(self, path: Path) -> StoredTensors:
        """Return all tensors in *path* for reading. By default these are the tensors of the model.

        A format that stores other tensors in the same files, such as optimizer state, overrides this method.
        """
        source = self.open(path)
        return StoredTensors(source.root, source.tensors)

    def training_state(self, path: Path, parameters: Parameters) -> TrainingState | None:
        """Return the training state in *path*, or None for a format that has none, or none that can be transferred.

        *parameters* returns the model's parameters in order, for a format that numbers them. Raises
        :class:`CheckpointUnusable` if the files are damaged or contradict each other or the model.
        """
        return None

    def training_left(self, path: Path) -> str:
        """Return why the training state in *path* cannot be imported, in words. Empty if it can, or if there is none.

        Never raises.
        """
        return ""

    def counters(self, path: Path) -> Counters:
        """Return the step, epoch and samples that the files in *path* state, without a look at the model.

        Raises :class:`CheckpointUnusable` if the files are damaged.
        """
        return Counters()

    def losses(self, path: Path) -> Values:
        """Return the last losses that the files state, for display: ``train_loss``, ``val_loss``.

        A key is absent if the files do not state it. Never raises.
        """
        return {}

    def has_training_state(self, path: Path) -> bool:
        """Return whether :meth:`training_state` may find one, without the model's parameters. Never raises.

        By default, every format that overrides :meth:`training_state` has one.
        """
        return type(self).training_state is not Format.training_state

    def inventory(self, path: Path) -> Inventory:
        """Return the names, dtypes and shapes of all tensors in *path* for display.

        A format overrides this method if its metadata is enough and no file of tensors has to be opened.
        """
        stored = self.stored_tensors(path).tensors
        summaries = {
            fqn: TensorSummary(tensor.dtype, tensor.shape, len(tensor.slices))
            for fqn, tensor in stored.items()
        }
        return Inventory(summaries)


class UnsupportedFormat(Format):
    """A format that is recognized and not read. :meth:`open` raises an error with *hint*, the way to convert it."""

    is_readable = False
    hint: ClassVar[str]

    def open(self, path: Path) -> Source:
        """Raise :class:`CheckpointUnusable`, which names the format and the way to convert it."""
        raise unusable(
            f"this format cannot be read: {self.describe(path)}", path, path.name, self.hint
        )

    def describe(self, path: Path) -> str:
        """Return the format's name for the error. A format with variants overrides this method."""
        return self.name
