"""PyTorch DCP: a directory of ``.metadata`` and ``.distcp`` files, in which another program saved a state dict.

The training state is read, too. Programs save the state dict of an optimizer with the names of its parameters, in one
of two forms (source: torch.distributed.checkpoint.state_dict, torch 2.13):

* nested, as ``get_optimizer_state_dict`` returns it: ``state`` -> FQN -> entry, and ``param_groups``, a list of
  mappings with the FQNs under ``params``;
* flattened, with ``StateDictOptions(flatten_optimizer_state_dict=True)``: the keys ``state.FQN.ENTRY`` and
  ``param_groups.FQN.OPTION``, as torchtitan and NeMo AutoModel save it.

DCP flattens both to names in ``.metadata``, which also has the path of keys of each name. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Texts, ValueDict
from automodel_ckpt.checkpoint.parts.slices import Tensor, TensorMap
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.checkpoint.sources.source import Source, check_no_links
from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
from automodel_ckpt.convert.formats.files import (
    check_regular_files,
    faults_of,
    names_in,
    omitted_texts,
    renamed,
)
from automodel_ckpt.convert.formats.format import (
    Counters,
    Format,
    Inventory,
    OptimizerState,
    Parameters,
    TensorSummary,
    TrainingState,
)
from automodel_ckpt.convert.formats.nested_state import (
    OPTIMIZER_KEYS,
    Keys,
    keys_of_model,
    names_without_wrappers,
    without_wrappers,
)
from automodel_ckpt.convert.formats.torch.dcp_directory import (
    DcpContent,
    read_content,
    read_tensors,
    read_values,
)
from automodel_ckpt.convert.formats.torch.numbered_optimizer import (
    Key,
    damaged_optimizer,
    named_state,
    number_of,
)
from automodel_ckpt.convert.formats.torch.torch_objects import plain_values
from automodel_ckpt.convert.names.torchtitan import has_torchtitan_names
from automodel_ckpt.errors import CheckpointUnusable, unusable

DATA_SUFFIX = ".distcp"
_SCHEDULER_KEYS = ("lr_scheduler", "scheduler", "lr_schedulers", "sched", "scheduler_state_dict")
# Keys of counters, at the top level and in a mapping of the trainer's own state (torchtitan's train_state).
_COUNTER_KEYS = ("train_state", "trainer_state", "train_progress")
# The names of counters, and the field of :class:`Counters` for each.
_COUNTERS = {
    "step": "step",
    "global_step": "step",
    "epoch": "epoch",
    "epochs": "epoch",
    "consumed_samples": "consumed_samples",
    "samples_seen": "consumed_samples",
    "num_samples": "consumed_samples",
}


class PyTorchDcp(Format):
    """A directory with ``.metadata``. The state dict can contain more than the model, such as optimizer state."""

    name = "PyTorch DCP"
    has_own_names = True

    def detect(self, path: Path) -> bool:
        return os.path.lexists(path / layout.DCP_METADATA)

    def open(self, path: Path) -> Source:
        """Describe the model. Links are never followed: torch writes all files to one directory."""
        data_files = [name for name in names_in(path) if name.endswith(DATA_SUFFIX)]
        check_no_links(path, (layout.DCP_METADATA, layout.HF_METADATA))
        check_regular_files(path, data_files)
        content = _read(path)
        names = self.names(content)
        model = DcpContent({stored: content.tensors[stored] for stored in names}, {})
        tensors = renamed({each.fqn: each for each in read_tensors(path, model)}, names)
        if not tensors:
            raise unusable(
                "there are no tensors here",
                path,
                f"{len(content.values)} other values",
                "name the directory that the model was saved to",
            )
        omitted = omitted_texts(len(content.tensors) - len(tensors), len(content.values))
        return Source(path, path, tensors, omitted=omitted)

    def names(self, content: DcpContent) -> Texts:
        """Return {stored name: name in the model} of the model's tensors. A format of one program overrides this."""
        return plain_model_names(content)

    def training_state(self, path: Path, parameters: Parameters) -> TrainingState | None:
        """Return the optimizer's state, counters and LR schedule, if they are in the same directory as the model.

        They have the names of the parameters: *parameters* is not called.
        """
        if self.training_left(path):
            return None
        return read_training_state(path, _read(path), self.open(path).tensors)

    def training_left(self, path: Path) -> str:
        try:
            content = _read(path)
        except CheckpointUnusable:
            return ""
        is_torchtitan = has_torchtitan_names(content.tensors) and optimizer_key(content) is not None
        return "the names in the optimizer are torchtitan's" if is_torchtitan else ""

    def counters(self, path: Path) -> Counters:
        return read_counters(path, _read(path))

    def has_training_state(self, path: Path) -> bool:
        try:
            return optimizer_key(_read(path)) is not None and not self.training_left(path)
        except CheckpointUnusable:
            return False

    def stored_tensors(self, path: Path) -> StoredTensors:
        tensors = {tensor.fqn: tensor for tensor in read_tensors(path, read_content(path))}
        return StoredTensors(path, tensors)

    def inventory(self, path: Path) -> Inventory:
        content = read_content(path)
        summaries = {
            fqn: TensorSummary(entry.dtype, entry.shape, len(entry.chunks))
            for fqn, entry in content.tensors.items()
        }
        return Inventory(summaries, len(content.values))


def _read(path: Path) -> DcpContent:
    """Read ``.metadata``. Keys around the model's and the optimizer's state dicts (``app``) are removed from paths."""
    content = read_content(path)
    root = _keys_of_model(content)[:-1]
    if not root:
        return content
    paths = {}
    for fqn, keys in content.paths.items():
        is_below = keys[: len(root)] == root and len(keys) > len(root)
        paths[fqn] = keys[len(root) :] if is_below else keys
    return replace(content, paths=paths)


def _keys_of_model(content: DcpContent) -> Keys:
    return keys_of_model(content.paths.get(fqn, (fqn,)) for fqn in content.tensors)


def plain_model_names(content: DcpContent) -> Texts:
    """Return {stored name: name in the model} for each tensor of the model, without the names of wrappers."""
    names = _model_names(content)
    plain = names_without_wrappers(list(names.values()))
    return {stored: plain[name] for stored, name in names.items()}


def _model_names(content: DcpContent) -> Texts:
    """Return {stored name: name in the model's own state dict} for each tensor that belongs to the model.

    If the saved state dict was nested, the mapping under ``model`` or a similar key is the model. Otherwise all tensors
    are, except an optimizer's tensors and the program's counters, which torchtitan saves next to the weights.
    """
    keys = _keys_of_model(content)
    below = {
        fqn: ".".join(map(str, path[len(keys) :]))
        for fqn, path in content.paths.items()
        if fqn in content.tensors and path[: len(keys)] == keys
    }
    # Two paths can join to one name: ("a.b",) and ("a", "b").
    if keys and len(set(below.values())) == len(below):
        return below
    optimizer = optimizer_key(content)
    others = {optimizer, "dataloader", *_SCHEDULER_KEYS, *_COUNTER_KEYS} if optimizer else set()
    found = {}
    for fqn in content.tensors:
        outer, *inner = content.paths.get(fqn, (fqn,))
        # The state of an optimizer under an unusual key has "state", a parameter and an entry in its path.
        if (
            outer not in others
            and "state" not in inner[:-1]
            and not fqn.startswith(f"{optimizer}.")
        ):
            found[fqn] = fqn
    return found


# ---------------------------------------------------------------- the training state


def read_optimizer(
    directory: Path,
    content: DcpContent,
    key: str,
    weights: TensorMap,
    *,
    rename: Callable[[str], str] = without_wrappers,
) -> OptimizerState | None:
    """Return the state of the optimizer under *key*, or None when there is none.

    *weights* are the model's tensors, and *rename* converts the FQNs in the state to their names. Raises
    :class:`CheckpointUnusable` if the state does not belong to them, or if it numbers its parameters.
    """
    entries, grouped = _optimizer(content, key)
    if not entries and not grouped:
        return None
    where = directory / layout.DCP_METADATA
    numbered = [fqn for fqn in entries if fqn.isdecimal()]
    if numbered:
        raise unusable(
            "the optimizer's state numbers its parameters instead of naming them",
            where,
            f"state.{numbered[0][:20]}",
            "save what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns",
        )
    stored = {*grouped.values(), *(name for entry in entries.values() for name in entry.values())}
    with damaged_optimizer(where):
        loaded = _loaded(directory, content, stored)
        state: dict[Key, ValueDict] = {
            fqn: {what: loaded[name] for what, name in entry.items()}
            for fqn, entry in entries.items()
        }
        options = {}
        for path, name in grouped.items():
            is_number = isinstance(loaded[name], Tensor)
            options[path] = number_of(loaded[name], directory) if is_number else loaded[name]
        groups = _groups(options)
        names = {fqn: rename(fqn) for group in groups for fqn in group["params"]}
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        return named_state(state, groups, names, shapes, root=directory, where=where)


def read_training_state(
    directory: Path, content: DcpContent, weights: TensorMap
) -> TrainingState | None:
    """Return the training state in the same state dict as the model, or None when there is no optimizer."""
    key = optimizer_key(content)
    if key is None:
        return None
    used = {key, *_SCHEDULER_KEYS, *_COUNTER_KEYS, *_COUNTERS}
    omitted = dict.fromkeys(str(_path(content, fqn)[0]) for fqn in content.values)
    return TrainingState(
        **vars(read_counters(directory, content)),
        optimizer=read_optimizer(directory, content, key, weights),
        scheduler=read_scheduler(directory, content),
        omitted=tuple(name for name in omitted if name not in used and name.isprintable()),
    )


def read_counters(directory: Path, content: DcpContent) -> Counters:
    """Return the step, epoch and samples that the program saved with the model, such as torchtitan's train_state."""
    fields = {}
    for fqn in (*content.tensors, *content.values):
        *outer, last = _path(content, fqn)
        if last in _COUNTERS and (not outer or (len(outer) == 1 and outer[0] in _COUNTER_KEYS)):
            fields[fqn] = _COUNTERS[str(last)]
    found = {}
    for fqn, value in _loaded(directory, content, fields).items():
        with suppress(Fault):  # not a number
            found[fields[fqn]] = number_of(value, directory)
    return Counters.of(*map(found.get, ("step", "epoch", "consumed_samples")))


def optimizer_key(content: DcpContent) -> str | None:
    """Return the key of the nested state dict that has an optimizer's state, or None when there is none."""
    return next((key for key in OPTIMIZER_KEYS if _optimizer(content, key)[0]), None)


def read_scheduler(directory: Path, content: DcpContent) -> ValueDict | None:
    """Return the plain values of the LR scheduler's state, or None when there is none."""
    names = [fqn for fqn in content.values if _path(content, fqn)[0] in _SCHEDULER_KEYS]
    if not names:
        return None
    state = {}
    for fqn, value in _loaded(directory, content, names).items():
        path = _path(content, fqn)
        if len(path) > 1:
            state[str(path[-1])] = value
        elif isinstance(value, dict):
            state |= value
    with faults_of(directory / layout.DCP_METADATA):
        return plain_values(state)


def _loaded(directory: Path, content: DcpContent, names: Collection[str]) -> ValueDict:
    """Return the tensors, as descriptions, and the values of these *names*."""
    described = {name: content.tensors[name] for name in names if name in content.tensors}
    items = {name: content.values[name] for name in names if name in content.values}
    tensors = read_tensors(directory, DcpContent(described, {}))
    return {tensor.fqn: tensor for tensor in tensors} | dict(read_values(directory, items))


# ---------------------------------------------------------------- names


def _path(content: DcpContent, fqn: str) -> Keys:
    return content.paths.get(fqn, (fqn,))


def _optimizer(
    content: DcpContent, key: str
) -> tuple[dict[str, TextDict], dict[tuple[str, str], str]]:
    """Return the names in ``.metadata`` of an optimizer's state under *key*: {FQN: {entry: name}}, and its groups.

    The latter are by (index or FQN, option), or ("", "") where the list of groups is one value.
    """
    entries: dict[str, TextDict] = {}
    grouped = {}
    for fqn in (*content.tensors, *content.values):
        # Nested or flattened, the keys make up the same text. Neither an entry nor an option has a dot.
        outer, _, keys = ".".join(map(str, _path(content, fqn))).partition(".")
        kind, _, rest = keys.partition(".")
        owner, _, last = rest.rpartition(".")
        if outer != key:
            continue
        if kind == "state" and owner:
            entries.setdefault(owner, {})[last] = fqn
        elif kind == "param_groups":
            grouped[owner, last] = fqn
    return entries, grouped


def _groups(grouped: Mapping[tuple[str, str], Any]) -> list[ValueDict]:
    """Return ``param_groups``, from one value, from an option of each group, or from one of each parameter."""
    if ("", "") in grouped:
        groups: list[ValueDict] = grouped["", ""]
        return groups
    by_owner: dict[str, ValueDict] = {}
    for (owner, option), value in grouped.items():
        if owner:
            by_owner.setdefault(owner, {})[option] = value
        else:
            by_owner[option] = value
    if all(map(str.isdecimal, by_owner)):
        return [by_owner[number] for number in sorted(by_owner, key=int)]
    # Parameters with the same options are in one group, in the order in which they are stored.
    found: dict[str, ValueDict] = {}
    for fqn, options in by_owner.items():
        plain = plain_values(options)
        # Plain values have the same text if and only if they are equal, also lists.
        group = found.setdefault(repr(sorted(plain.items())), {**plain, "params": []})
        group["params"].append(fqn)
    return list(found.values())
