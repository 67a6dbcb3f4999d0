"""The training state of another program's checkpoint, as its format describes it. Imports no torch.

Tensors are described as slices of files, as those of a model. Everything else is plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.convert.type_aliases import Shape, TensorMap, Values


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """The names of an optimizer's parameters with the same options, such as ``lr``, ``betas`` and ``weight_decay``."""

    parameters: tuple[str, ...]
    options: Values


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer.

    *tensors* maps the name of a parameter to its tensors by entry, for example ``exp_avg`` and ``exp_avg_sq``. They
    are slices of files below *root*. *values* maps it to its numbers by entry, for example ``{"step": 10.0}``. Both
    have the names of the model that the format's ``open()`` returns. Each parameter is in one of the *groups*; one
    that was never updated is in neither mapping. *names_from* states, in words, how parameters that the file numbers
    got their names; empty if the file names them.
    """

    root: Path
    tensors: Mapping[str, TensorMap]
    values: Mapping[str, Mapping[str, int | float | bool]]
    groups: tuple[ParameterGroup, ...]
    names_from: str = ""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a checkpoint states about its training run. A field is None if the checkpoint does not state it.

    *step* counts optimizer steps, *epoch* finished epochs, and *consumed_samples* the samples of all ranks. *scheduler*
    has the plain values of the LR scheduler's ``state_dict()``. *omitted* names, in words, what is not transferred.
    """

    step: int | None = None
    epoch: int | None = None
    consumed_samples: int | None = None
    optimizer: OptimizerState | None = None
    scheduler: Values | None = None
    omitted: tuple[str, ...] = ()
