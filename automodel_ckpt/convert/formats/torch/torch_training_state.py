"""The training state in a single file of ``torch.save``: that of PyTorch Lightning, or of a plain training script.

A training script saves ``{"model": ..., "optimizer": ..., "scheduler": ..., "step": 10, "epoch": 1}``, under names that
differ between scripts. PyTorch Lightning (2.6) saves ``optimizer_states`` and ``lr_schedulers``, which are lists,
``global_step``, ``epoch``, and the progress of its loops. Both number the parameters of the optimizer
(``numbered_optimizer.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from automodel_ckpt.convert.formats.format import Counters
from automodel_ckpt.convert.formats.torch.nested_state import without_wrappers
from automodel_ckpt.convert.formats.torch.numbered_optimizer import optimizer_state
from automodel_ckpt.convert.formats.torch.plain_values import plain_values
from automodel_ckpt.convert.formats.torch.torch_files import (
    LIGHTNING_VERSION,
    TorchModel,
    faults_of,
    is_optimizer,
    model_key,
    model_of,
    read_archive,
    state_in,
)
from automodel_ckpt.convert.formats.torch.torch_objects import Archive
from automodel_ckpt.convert.formats.torch.training_state import (
    OptimizerState,
    Parameters,
    TrainingState,
)
from automodel_ckpt.errors import CheckpointUnusable

_OPTIMIZER_KEYS = (
    "optimizer",
    "optimizer_state",
    "optimizer_state_dict",
    "optim",
    "optim_state_dict",
    "optimizer_states",
)
_SCHEDULER_KEYS = (
    "scheduler",
    "scheduler_state",
    "scheduler_state_dict",
    "lr_scheduler",
    "lr_scheduler_state",
    "lr_scheduler_state_dict",
    "lr_schedulers",
)
_STEP_KEYS = ("global_step", "step", "global_steps", "steps", "iteration", "iter_num")
_EPOCH_KEYS = ("epoch",)
_SAMPLES_KEYS = ("consumed_samples", "consumed_train_samples")
_TIMESTAMP = {"batch": "step", "epoch": "epoch", "sample": "consumed_samples"}
# More than this many keys that are not transferred are counted.
_MAX_NAMED = 12
_MAX_COUNT = 2**62


def read_training_state(path: Path, parameters: Parameters) -> TrainingState | None:
    """Return the training state in the file *path*, which is not a symbolic link; None if it has only a model.

    Raises :class:`CheckpointUnusable` if the file is damaged, or the optimizer's numbers cannot be assigned to the
    model's *parameters*.
    """
    archive = read_archive(path)
    model = model_of(archive, path)
    if not _is_training_state(archive.value):
        return None
    value = _state_of(archive.value)
    key = model_key(value)
    optimizer_key = _optimizer_key(value)
    scheduler_key = _first(value, _SCHEDULER_KEYS)
    step, step_key = _count(value, _STEP_KEYS)
    epoch, epoch_key = _count(value, _EPOCH_KEYS)
    samples, samples_key = _count(value, _SAMPLES_KEYS)
    used = {key, optimizer_key, scheduler_key, step_key, epoch_key, samples_key, LIGHTNING_VERSION}
    omitted = list(other_keys(value, used))
    optimizer = None
    if optimizer_key is not None:
        state, reason = only_item(value[optimizer_key])
        if reason:
            omitted.append(f"{optimizer_key} ({reason})")
        else:
            optimizer = _optimizer(state, archive, model, parameters, path)
    with faults_of(path):
        scheduler = None
        if scheduler_key is not None:
            scheduler, reason = scheduler_values(value[scheduler_key])
            if reason:
                omitted.append(f"{scheduler_key} ({reason})")
        if LIGHTNING_VERSION in value:
            epoch = finished_epochs(value.get("loops"), epoch)
    return TrainingState(step, epoch, samples, optimizer, scheduler, tuple(omitted))


def has_training_state(path: Path) -> bool:
    """Return whether the file *path*, which is not a symbolic link, has an optimizer, a schedule or counters."""
    try:
        return _is_training_state(read_archive(path).value)
    except CheckpointUnusable:
        return False


def _is_training_state(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    value = _state_of(value)
    # Without a key of the model, the file is the state dict itself: its keys are names of tensors.
    if model_key(value) is None:
        return False
    states = _optimizer_key(value) or _first(value, _SCHEDULER_KEYS)
    counters = counters_of(value)
    return states is not None or counters.step is not None or counters.epoch is not None


def read_counters(path: Path) -> Counters:
    """Return the step, epoch and samples that the file *path*, which is not a symbolic link, states.

    Raises :class:`CheckpointUnusable` if the file is damaged.
    """
    return counters_of(read_archive(path).value)


def counters_of(value: object) -> Counters:
    """Return the counters in the object of a file; none if it is a state dict itself."""
    if not isinstance(value, dict):
        return Counters()
    value = _state_of(value)
    step, _ = _count(value, _STEP_KEYS)
    epoch, _ = _count(value, _EPOCH_KEYS)
    samples, _ = _count(value, _SAMPLES_KEYS)
    return Counters(step, epoch, samples)


def _state_of(value: dict[Any, Any]) -> dict[Any, Any]:
    """Return the parts of a training state under usual keys.

    Composer (0.32) saves those of ``state`` by their classes: ``optimizers: {AdamW: ...}``, ``schedulers``, and the
    counters as ``timestamp: {Timestamp: {batch: 10, epoch: 1, sample: 80}}``.
    """
    value = state_in(value)
    timestamp = value.get("timestamp")
    if isinstance(timestamp, dict):
        timestamp = timestamp.get("Timestamp", timestamp)
    if not isinstance(timestamp, dict) or "batch" not in timestamp:
        return value
    counters = {usual: timestamp.get(key) for key, usual in _TIMESTAMP.items()}
    plain = {**counters, **{key: item for key, item in value.items() if key != "timestamp"}}
    for key, usual in (("optimizers", "optimizer"), ("schedulers", "scheduler")):
        items = plain.get(key)
        if isinstance(items, dict) and len(items) == 1:
            del plain[key]
            ((name, plain[usual]),) = items.items()
            if name == "DecoupledAdamW":
                plain[usual] = _with_torch_decay(plain[usual])
    return plain


def _with_torch_decay(optimizer: Any) -> Any:
    """Return the state of Composer's DecoupledAdamW with the weight decay that torch's AdamW has for the same updates.

    It multiplies weights by ``1 - lr / initial_lr * weight_decay``, torch by ``1 - lr * weight_decay``.
    """
    if not is_optimizer(optimizer) or not isinstance(optimizer["param_groups"], list):
        return optimizer
    groups = []
    for group in optimizer["param_groups"]:
        changed = group
        if isinstance(group, dict):
            decay, rate = group.get("weight_decay"), group.get("initial_lr")
            if type(decay) is float and type(rate) is float and rate > 0:
                changed = {**group, "weight_decay": decay / rate}
        groups.append(changed)
    return {**optimizer, "param_groups": groups}


def _optimizer(
    state: Any, archive: Archive, model: TorchModel, parameters: Parameters, path: Path
) -> OptimizerState:
    def renamed(name: str) -> str:
        # In the order in which the names of the model were changed: all wrappers, then Lightning's attribute.
        return without_wrappers(name).removeprefix(model.attribute)

    return optimizer_state(
        state, archive, parameters, root=path.parent, file=path.name, rename=renamed
    )


def only_item(value: Any) -> tuple[Any, str]:
    """Return the only item of a list, or *value* if it is not a list; and why there is none, in words."""
    if not isinstance(value, list):
        return value, ""
    if len(value) != 1:
        return None, f"{len(value)} of them; only one can be transferred"
    return value[0], ""


def scheduler_values(value: Any) -> tuple[Mapping[str, Any] | None, str]:
    """Return the plain values of an LR scheduler's state dict, or of the only one in a list; else why there are none.

    Raises :class:`Fault` for values that are nested too deeply.
    """
    if value is None or value == [] or value == {}:
        return None, ""
    state, reason = only_item(value)
    if reason:
        return None, reason
    if not isinstance(state, dict):
        return None, f"of another form: {type(state).__name__}"
    plain = plain_values(state)
    return {name: item for name, item in plain.items() if isinstance(name, str)}, ""


def finished_epochs(loops: Any, epoch: int | None) -> int | None:
    """Return the number of epochs that Lightning has finished, from the progress of its loops.

    ``epoch`` is the number of the current epoch. A file that is saved after the last batch of an epoch, and before
    Lightning counts the epoch as completed, has all of its samples (source: FitLoop, lightning 2.6). Returns *epoch*
    if *loops* has another form.
    """
    fit_loop = loops.get("fit_loop") if isinstance(loops, dict) else None
    if not isinstance(fit_loop, dict):
        return epoch
    progress, batches = fit_loop.get("epoch_progress"), fit_loop.get("epoch_loop.batch_progress")
    current = progress.get("current") if isinstance(progress, dict) else None
    if not isinstance(current, dict) or not isinstance(batches, dict):
        return epoch
    completed, ready = current.get("completed"), current.get("ready")
    if not (_is_count(completed) and _is_count(ready)):
        return epoch
    is_running = ready > completed
    if is_running and batches.get("is_last_batch") is True:
        return completed + 1
    return completed


def _optimizer_key(value: Mapping[Any, Any]) -> str | None:
    """Return the key of the optimizer's state: a usual one, or that of the only state dict of an optimizer."""
    usual = _first(value, _OPTIMIZER_KEYS)
    found = [key for key, item in value.items() if isinstance(key, str) and is_optimizer(item)]
    if usual is None and len(found) == 1:
        return found[0]
    return usual


def _first(value: Mapping[Any, Any], keys: Iterable[str]) -> str | None:
    """Return the first of *keys* under which there is a state: a mapping or a list that is not empty."""
    for key in keys:
        found = value.get(key)
        if isinstance(found, (dict, list)) and found:
            return key
    return None


def _count(value: Mapping[Any, Any], keys: Iterable[str]) -> tuple[int | None, str | None]:
    """Return the first count under one of *keys*, and its key."""
    for key in keys:
        found = value.get(key)
        # consumed_samples is a float in some programs.
        if type(found) is float and found.is_integer():
            found = int(found)
        if _is_count(found):
            return found, key
    return None, None


def _is_count(value: object) -> TypeGuard[int]:
    # Not isinstance: True is an int, too.
    return type(value) is int and 0 <= value <= _MAX_COUNT


def other_keys(value: Mapping[Any, Any], used: Collection[str | int | None]) -> Iterable[str]:
    """Yield the keys of what is not transferred."""
    others: list[str] = []
    for key, item in value.items():
        is_empty = isinstance(item, (dict, list)) and not item
        if key not in used and item is not None and not is_empty:
            others.append(str(key)[:100])
    yield from others[:_MAX_NAMED]
    if len(others) > _MAX_NAMED:
        yield f"{len(others) - _MAX_NAMED} other entries"
