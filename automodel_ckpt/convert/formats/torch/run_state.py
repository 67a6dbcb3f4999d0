"""The training state of a checkpoint of this program, for exports to programs that continue its run.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.files.safe_open import open_safely, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import ValueDict, Values
from automodel_ckpt.checkpoint.parts.manifest import Blob, Manifest, Tree
from automodel_ckpt.checkpoint.parts.slices import TensorMap
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.convert.formats.files import faults_of
from automodel_ckpt.convert.formats.format import ParameterGroup
from automodel_ckpt.convert.formats.torch.torch_objects import describe_archive, plain_values
from automodel_ckpt.errors import unusable

_MODEL_ATTRIBUTE = "model."
_MAX_STATE_BYTES = 16 << 20
_OPTION = re.compile(r"param_groups\.([0-9]{1,3})\.(\w+)", re.ASCII)


@dataclass(frozen=True)
class RunState:
    """The state of a run, by the names of the model's parameters.

    *tensors* maps a parameter to its tensors by entry: slices of files below *root*. Tensors of one element (``step``)
    are included. *values* has the entries that are not tensors. *groups* has the numbers of the optimizer's groups, and
    the parameters in each are in the order of ``named_parameters()``. *schedule* is the state of the LR schedule.
    *epochs_done* counts finished epochs, and *steps_in_epoch* the optimizer steps since.
    """

    root: Path
    step: int
    epochs_done: int
    steps_in_epoch: int
    tensors: Mapping[str, TensorMap]
    values: Mapping[str, Values]
    groups: tuple[ParameterGroup, ...]
    schedule: Values | None


def read_run_state(checkpoint: Path) -> RunState | None:
    """Return the training state of a *checkpoint* of this program.

    Returns None when it has no optimizer. Raises :class:`CheckpointUnusable` if a file is damaged, or if
    there are several optimizers.
    """
    manifest = Manifest.read(checkpoint)
    optimizers = [name for name, record in manifest.state.items() if record.kind == "optimizer"]
    if not optimizers:
        return None
    if len(optimizers) > 1:
        raise unusable(
            "a run with several optimizers cannot be exported with its training state",
            checkpoint,
            ", ".join(optimizers),
        )
    (name,) = optimizers
    tree = manifest.trees[name]
    options: dict[int, ValueDict] = {}
    values = {}
    prefix = f"{name}.state."
    for fqn, blob in tree.objects.items():
        option = _OPTION.fullmatch(fqn.removeprefix(f"{name}."))
        if option is not None:
            options.setdefault(int(option[1]), {})[option[2]] = _value(checkpoint, fqn, blob)
        elif fqn.startswith(prefix):
            values[fqn] = _value(checkpoint, fqn, blob)
    groups = []
    for _, group in sorted(options.items()):
        names = group.pop("params", [])
        groups.append(ParameterGroup(tuple(map(_without_attribute, names)), group))
    parameters = {parameter for group in groups for parameter in group.parameters}

    def by_parameter(stored: Values) -> dict[str, ValueDict]:
        found: dict[str, ValueDict] = {}
        for fqn, value in stored.items():
            parameter, _, entry = _without_attribute(fqn.removeprefix(prefix)).rpartition(".")
            if parameter not in parameters:
                raise unusable(
                    "a value in the optimizer's state belongs to no parameter of its groups",
                    checkpoint,
                    fqn,
                )
            found.setdefault(parameter, {})[entry] = value
        return found

    return RunState(
        checkpoint,
        manifest.step,
        *_position(checkpoint, manifest),
        by_parameter(tree.tensors),
        by_parameter(values),
        tuple(groups),
        _schedule(manifest, tree, checkpoint),
    )


def _without_attribute(name: str) -> str:
    """Return a name in the model: the optimizer's names begin with the attribute of its module."""
    return name.removeprefix(_MODEL_ATTRIBUTE)


def _schedule(manifest: Manifest, tree: Tree, checkpoint: Path) -> Values | None:
    for name, record in manifest.state.items():
        if record.kind != "lr_scheduler" or name not in tree.objects:
            continue
        # The state is stored in a tuple of one, which DCP keeps whole.
        value = _value(checkpoint, name, tree.objects[name])
        if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], dict):
            return value[0]
    return None


def _position(checkpoint: Path, manifest: Manifest) -> tuple[int, int]:
    """Return the number of finished epochs, and of optimizer steps since."""
    epochs_done = manifest.epoch
    if "step_scheduler.pt" in manifest.files:
        stated = _state(checkpoint, "step_scheduler.pt").get("epochs_done")
        epochs_done = stated if type(stated) is int else epochs_done
    for path in manifest.files:
        if not path.startswith("dataloader"):
            continue
        # The state of the data loader, of one rank after another.
        state = _state(checkpoint, path)
        samples, size = state.get("consumed_samples"), state.get("global_batch_size")
        if type(samples) is not int or type(size) is not int or size < 1:
            continue
        if state.get("epoch") != epochs_done:
            return epochs_done, 0
        # The last batch of an epoch can have fewer samples.
        return epochs_done, -(-samples // size)
    return epochs_done, 0


def _state(checkpoint: Path, path: str) -> ValueDict:
    with faults_of(checkpoint / path):
        archive = describe_archive(read_safely(checkpoint, path, limit=_MAX_STATE_BYTES))
    return archive.value if isinstance(archive.value, dict) else {}


def _value(checkpoint: Path, fqn: str, blob: Blob) -> Any:
    """Return the plain value *fqn*, compared with its digest. Raises :class:`CheckpointUnusable` if it is damaged."""
    where = checkpoint / blob.file
    with faults_of(where, "a value of the optimizer cannot be read"):
        if blob.nbytes > _MAX_STATE_BYTES:
            raise Fault(f"{fqn} is too large: {blob.nbytes} bytes")
        with os.fdopen(open_safely(checkpoint, blob.file), "rb") as file:
            file.seek(blob.start)
            data = file.read(blob.nbytes)
        if blob.digest is not None and digest_of(data) != blob.digest:
            raise Fault(f"{fqn} is damaged: its digest differs")
        # In a mapping, because the function copies only containers; one that is not plain data is left out.
        return plain_values({"value": describe_archive(data).value})["value"]
