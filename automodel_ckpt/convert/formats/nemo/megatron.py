"""Checkpoints of Megatron-LM, Megatron-Core and NeMo 2. Imports no torch.

A distributed checkpoint of Megatron-Core (``dist_checkpointing``, 0.16) with the backend ``torch_dist`` is a directory
of PyTorch DCP with ``metadata.json`` (``{"sharded_backend": "torch_dist"}``) and, if it has state that is not sharded,
``common.pt``. Tensors have the keys of sharded_state_dict(), which is one name for all parts of a tensor. A run of
Megatron-LM has a directory for each checkpoint, and a file with the iteration of the newest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.parts.slices import TensorDict
from automodel_ckpt.checkpoint.pickles.torch_archive_reading import Fault
from automodel_ckpt.checkpoint.sources.source import Source, check_no_links
from automodel_ckpt.checkpoint.tensors.difference import StoredTensors
from automodel_ckpt.convert.formats.files import (
    check_regular_files,
    faults_of,
    names_in,
    optional_json,
)
from automodel_ckpt.convert.formats.format import Counters, Format, UnsupportedFormat
from automodel_ckpt.convert.formats.nemo.zarr_arrays import read_arrays, zarr_tensor
from automodel_ckpt.convert.formats.torch.dcp import DATA_SUFFIX
from automodel_ckpt.convert.formats.torch.dcp_directory import (
    DcpContent,
    read_content,
    read_tensors,
)
from automodel_ckpt.convert.formats.torch.torch_files import read_archive
from automodel_ckpt.convert.formats.torch.torch_objects import Opaque
from automodel_ckpt.convert.names.dimensions import config_of_arguments
from automodel_ckpt.convert.names.megatron_names import is_model_tensor
from automodel_ckpt.errors import unusable

_MAX_LATEST_BYTES = 64
_COMMON = "common.pt"
_WEIGHTS = "weights"
_LATEST = "latest_checkpointed_iteration.txt"
_TORCH_DIST = "torch_dist"
_ZARR = "zarr"
_LEFT = "Megatron stores the optimizer in flat buffers of its ranks"
_ITERATION = re.compile(r"(?:iter_([0-9]{1,12})|release)", re.ASCII)
_RANK = re.compile(r"mp_rank_[0-9]{2}(_[0-9]{3})*", re.ASCII)


class MegatronCore(Format):
    """A distributed checkpoint: ``metadata.json`` with ``sharded_backend``, or ``common.pt`` next to ``.metadata``."""

    name = "a distributed checkpoint of Megatron-Core"

    def detect(self, path: Path) -> bool:
        names = names_in(path)
        if _COMMON in names and ".metadata" in names:
            return True
        return sharded_backend(path) is not None

    def open(self, path: Path) -> Source:
        """Describe the model under the names that Megatron stores. Links are never followed."""
        path = self.place(path)
        data_files = [name for name in names_in(path) if name.endswith(DATA_SUFFIX)]
        check_no_links(path, (layout.DCP_METADATA, _COMMON))
        check_regular_files(path, data_files)
        tensors, others = _stored(path, only_model=True)
        if not tensors:
            raise unusable("there are no weights here", path, counted(len(others), "other entry"))
        common = read_common(path)
        return Source(
            path,
            path,
            tensors,
            omitted=tuple(_omitted(others)),
            stated_config=config_of_arguments(_arguments(common)),
        )

    def stored_tensors(self, path: Path) -> StoredTensors:
        path = self.place(path)
        return StoredTensors(path, _stored(path, only_model=False)[0])

    def counters(self, path: Path) -> Counters:
        """Return the iteration and the consumed samples."""
        common = read_common(self.place(path))
        arguments = _arguments(common)
        step = common.get("iteration", arguments.get("iteration"))
        return Counters.of(step, None, arguments.get("consumed_train_samples"))

    def training_left(self, path: Path) -> str:
        return _LEFT

    def place(self, path: Path) -> Path:
        """Return the directory with the files of the checkpoint. A format with others around it overrides this.

        Raises :class:`CheckpointUnusable` if it is missing.
        """
        return path


class MegatronRun(MegatronCore):
    """A run: ``latest_checkpointed_iteration.txt`` and the directories of its checkpoints."""

    name = "a run of Megatron-LM"

    def detect(self, path: Path) -> bool:
        names = names_in(path)
        return _LATEST in names and any(_ITERATION.fullmatch(name) for name in names)

    def parts(self, path: Path) -> frozenset[str]:
        return frozenset(name for name in names_in(path) if _ITERATION.fullmatch(name))

    def place(self, path: Path) -> Path:
        """Return the directory of the newest checkpoint."""
        with faults_of(path / _LATEST, "this file does not name an iteration"):
            text = read_safely(path, _LATEST, limit=_MAX_LATEST_BYTES).decode("ascii").strip()
            name = text if text == "release" else f"iter_{int(text):07}"
            if _ITERATION.fullmatch(name) is None:
                raise Fault(text[:40])
        newest = path / name
        if newest.is_symlink() or not newest.is_dir():
            raise unusable("the newest checkpoint of this run is missing", newest, "no directory")
        if MegatronRanks().detect(newest):
            MegatronRanks().open(newest)  # raises an error with the program that converts it
        if not MegatronCore().detect(newest):
            raise unusable("this checkpoint has no known format", newest, "no metadata.json")
        return newest


class MegatronRanks(UnsupportedFormat):
    """The older form: a directory ``mp_rank_XX`` for each rank."""

    name = "a checkpoint of Megatron-LM, a directory for each rank"
    hint = (
        "convert it to Hugging Face files with Megatron's or NeMo's own tools (Megatron Bridge, or "
        "tools/checkpoint/convert.py of Megatron-LM), and import those"
    )

    def detect(self, path: Path) -> bool:
        return any((path / name).is_dir() for name in filter(_RANK.fullmatch, names_in(path)))


class Nemo2(MegatronCore):
    """A checkpoint of NeMo 2: Megatron-Core's in ``weights/``, next to ``context/``."""

    name = "a checkpoint of NeMo 2 (Megatron-Core)"

    def detect(self, path: Path) -> bool:
        names = names_in(path)
        has_both = _WEIGHTS in names and "context" in names
        return has_both and sharded_backend(path / _WEIGHTS) is not None

    def parts(self, path: Path) -> frozenset[str]:
        return frozenset((_WEIGHTS,))

    def place(self, path: Path) -> Path:
        check_no_links(path, (_WEIGHTS,))
        return path / _WEIGHTS


# ---------------------------------------------------------------- metadata.json and common.pt


def sharded_backend(directory: Path) -> str | None:
    """Return ``torch_dist`` or ``zarr`` from the metadata.json of Megatron-Core, or None when it is not there."""
    backend = optional_json(directory, "metadata.json").get("sharded_backend")
    return backend[:40] if isinstance(backend, str) else None


def _stored(path: Path, *, only_model: bool) -> tuple[TensorDict, list[str]]:
    """Return the tensors, and the names of everything else. Raises :class:`CheckpointUnusable`."""
    backend = sharded_backend(path)
    if backend not in (_TORCH_DIST, _ZARR, None):
        raise unusable(
            "the backend of this distributed checkpoint of Megatron-Core is not supported",
            path / "metadata.json",
            backend,
            "save it with Megatron-Core's backend torch_dist (--ckpt-format torch_dist)",
        )

    def is_wanted(name: str) -> bool:
        return not only_model or is_model_tensor(name)

    if backend == _ZARR:
        arrays = read_arrays(path)
        found = {name: zarr_tensor(path, arrays[name]) for name in arrays if is_wanted(name)}
        return found, [name for name in arrays if name not in found]
    content = read_content(path)
    wanted = {fqn: entry for fqn, entry in content.tensors.items() if is_wanted(fqn)}
    found = {tensor.fqn: tensor for tensor in read_tensors(path, DcpContent(wanted, {}))}
    return found, [name for name in (*content.tensors, *content.values) if name not in found]


def read_common(path: Path) -> dict[Any, Any]:
    """Return the mapping in ``common.pt``. Its objects are only described. Empty if there is no such file.

    Raises :class:`CheckpointUnusable` if the file is damaged.
    """
    if not os.path.lexists(path / _COMMON):
        return {}
    value = read_archive(path / _COMMON).value
    return value if isinstance(value, dict) else {}


def _arguments(common: Mapping[Any, Any]) -> Values:
    """Return the arguments of Megatron-LM, an argparse.Namespace. Empty if there are none."""
    value = common.get("args")
    if isinstance(value, Opaque) and value.kind == "argparse.Namespace":
        value = value.state
    return value if isinstance(value, dict) else {}


def _omitted(others: Collection[str]) -> Iterator[str]:
    """Yield what an import of the weights leaves, in words: the *others* are names of entries."""
    num_extra = sum(1 for name in others if "_extra_state" in name)
    if len(others) > num_extra:
        number = counted(len(others) - num_extra, "entry", "entries")
        yield f"the state of the optimizer and of the ranks ({number})"
    if num_extra:
        yield f"{counted(num_extra, '_extra_state object')} of Transformer Engine"
