"""PyTorch DCP: a directory of ``.metadata`` and ``.distcp`` files, in which another program saved a state dict."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.sources.source import Source, check_no_links, unusable
from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
from automodel_ckpt.convert.formats.files import (
    check_regular_files,
    names_in,
    renamed,
    reports,
)
from automodel_ckpt.convert.formats.format import (
    Counters,
    Format,
    Inventory,
    Parameters,
    TensorSummary,
    TrainingState,
)
from automodel_ckpt.convert.formats.nested_state import (
    Keys,
    keys_of_model,
    names_without_wrappers,
)
from automodel_ckpt.convert.formats.torch.dcp_directory import (
    DcpContent,
    read_content,
    read_tensors,
)
from automodel_ckpt.convert.formats.torch.dcp_training_state import (
    COUNTER_KEYS,
    SCHEDULER_KEYS,
    optimizer_key,
    read_counters,
    read_training_state,
)
from automodel_ckpt.convert.names.torchtitan import has_torchtitan_names
from automodel_ckpt.errors import CheckpointUnusable

DATA_SUFFIX = ".distcp"


class PyTorchDcp(Format):
    """A directory with ``.metadata``. The state dict can contain more than the model, such as optimizer state."""

    name = "PyTorch DCP"
    has_own_names = True

    def detect(self, path: Path) -> bool:
        return os.path.lexists(path / layout.DCP_METADATA)

    def open(self, path: Path) -> Source:
        """Describe the model. Links are never followed: torch writes all files to one directory."""
        data_files = [name for name in names_in(path) if name.endswith(DATA_SUFFIX)]
        check_no_links(path, (*data_files, layout.DCP_METADATA, layout.HF_METADATA))
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
        notes, omitted = reports(len(content.tensors) - len(tensors), len(content.values))
        return Source(path, path, tensors, notes=notes, omitted=omitted)

    def names(self, content: DcpContent) -> Mapping[str, str]:
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


def plain_model_names(content: DcpContent) -> Mapping[str, str]:
    """Return {stored name: name in the model} for each tensor of the model, without the names of wrappers."""
    names = _model_names(content)
    plain = names_without_wrappers(list(names.values()))
    return {stored: plain[name] for stored, name in names.items()}


def _model_names(content: DcpContent) -> Mapping[str, str]:
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
    others = {optimizer, "dataloader", *SCHEDULER_KEYS, *COUNTER_KEYS} if optimizer else set()
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
