"""What is tested: this project's checkpoints, and two plain ways of saving to compare them with.

A :class:`Session` is one run of a program in a directory: it may load what is there, then save. All ranks take part.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from automodel_ckpt.checkpoint.files.layout import DataParallelRanks
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from tools.crash import state

Format = Literal["safetensors", "torch_save"]
Layout = Literal["shards", "hf"]
GENERATION = 100_000
"""A step saved again by a later run holds the state ``step + GENERATION * generation``."""


@dataclass(frozen=True)
class Options:
    """How a run saves. *generation* tells the states of the same step apart."""

    keep_last: int | None = None
    restore_from: str | None = None
    export: bool = False
    generation: int = 0

    def seed(self, step: int) -> int:
        return step + GENERATION * self.generation


@dataclass(frozen=True)
class Loaded:
    """What a start found: the step, and the number whose state it is, bit for bit, on this rank; None: of none."""

    step: int
    seed: int | None


class Session(Protocol):
    def load(self) -> Loaded | None: ...
    def save(self, step: int) -> None: ...
    def close(self) -> None: ...


class Subject(Protocol):
    """A way of saving; *name* is its heading in the comparison."""

    @property
    def name(self) -> str: ...
    def open(self, root: Path, options: Options) -> Session: ...


def ranks_here() -> DataParallelRanks:
    """This process's position among the ranks of torch.distributed; one process where it is not initialized."""
    if not dist.is_initialized():
        return DataParallelRanks()
    return DataParallelRanks(dist.get_rank(), dist.get_world_size())


class SideFiles:
    """What an export needs beside the weights."""

    file_index_mapping: dict[str, int] = {}  # noqa: RUF012  # a field of the protocol, never changed

    maps = BaseMaps()
    files: dict[str, bytes] = {"config.json": json.dumps({"model_type": "tiny"}).encode()}  # noqa: RUF012  # the same
    nbytes = sum(map(len, files.values()))

    def write(self, directory: Path) -> None:
        directory.mkdir()
        for name, data in self.files.items():
            (directory / name).write_bytes(data)


@dataclass(frozen=True)
class Ours:
    """This project's Checkpointer."""

    model_save_format: Format = "safetensors"
    model_layout: Layout = "shards"
    rows: int = 1
    """How large the tensors are; see :func:`tools.crash.state.build`."""
    is_async: bool = False
    incremental: bool = False
    """Share the file of the frozen parameter with the checkpoint before."""

    @property
    def name(self) -> str:
        form = self.model_layout if self.model_layout == "hf" else self.model_save_format
        name = f"automodel_ckpt {form}"
        if self.is_async:
            name += ", asynchronous"
        if self.incremental:
            name += ", incremental"
        return name

    def open(self, root: Path, options: Options) -> OursSession:
        return OursSession(root, options, self)


class OursSession:
    def __init__(self, root: Path, options: Options, subject: Ours) -> None:
        self._options, self._rows = options, subject.rows
        self._made = state.build(0, self._rows)
        ours = CheckpointOptions(
            model_save_format=subject.model_save_format,
            model_layout=subject.model_layout,
            save_consolidated=options.export,
            restore_from=options.restore_from,
            keep_last=options.keep_last,
            is_async=subject.is_async,
            incremental=subject.incremental,
        )
        self._checkpointer = Checkpointer(root, options=ours, assets={"model": SideFiles()})

    def load(self) -> Loaded | None:
        resumed = self._checkpointer.load(discover(self._made))
        if resumed is None:
            return None
        found = state.digest(self._made)
        seeds = [resumed.step + GENERATION * generation for generation in range(2)]
        return Loaded(
            resumed.step,
            next((seed for seed in seeds if state.expected(seed, self._rows) == found), None),
        )

    def save(self, step: int) -> None:
        self._made = state.build(self._options.seed(step), self._rows)
        self._checkpointer.save(
            discover(self._made),
            step=step,
            epoch=0,
            config_yaml="seed: 1\n",
            losses={"step": step, "val_loss": loss_at(step)},
            progress={"consumed_samples": step},
            validated=True,
        )
        self._checkpointer.wait_for_save()

    def close(self) -> None:
        self._checkpointer.close()


def loss_at(step: int) -> float:
    """Each checkpoint is better than those before."""
    return 1.0 / step


@dataclass(frozen=True)
class PlainDcp:
    """torch.distributed.checkpoint.save into one directory, as its tutorial does: each save overwrites the last."""

    name: str = "torch DCP, in place"
    rows: int = 1

    def open(self, root: Path, options: Options) -> DcpSession:
        return DcpSession(root, self.rows)


class DcpSession:
    def __init__(self, root: Path, rows: int) -> None:
        self._path, self._rows = root / "checkpoint", rows

    def load(self) -> Loaded | None:
        if not self._path.exists():
            return None
        made = state.build(0, self._rows)
        tensors = state.tensors_of(made) | {"step": torch.tensor(0)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(tensors, checkpoint_id=self._path)
        return _recognised(made, int(tensors["step"]), self._rows)

    def save(self, step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overwriting is what is compared
            dcp_save(
                state.tensors_of(state.build(step, self._rows)) | {"step": torch.tensor(step)},
                checkpoint_id=self._path,
            )

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class PlainSafetensors:
    """safetensors' save_file by each rank into a directory per step, then its name into a text file LATEST."""

    name: str = "safetensors + LATEST"
    rows: int = 1

    def open(self, root: Path, options: Options) -> SafetensorsSession:
        return SafetensorsSession(root, self.rows)


class SafetensorsSession:
    def __init__(self, root: Path, rows: int) -> None:
        self._root, self._rows = root, rows

    def load(self) -> Loaded | None:
        latest = self._root / "LATEST"
        if not latest.exists():
            return None
        made = state.build(0, self._rows)
        name = latest.read_text()
        path = self._root / name / f"rank_{ranks_here().rank}.safetensors"
        _fill(made, load_file(path))
        return _recognised(made, int(name.removeprefix("step_")), self._rows)

    def save(self, step: int) -> None:
        ranks, directory = ranks_here(), self._root / f"step_{step}"
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: _local(value).contiguous()
            for name, value in state.tensors_of(state.build(step, self._rows)).items()
        }
        save_file(tensors, directory / f"rank_{ranks.rank}.safetensors")
        if dist.is_initialized():
            dist.barrier()
        if ranks.rank == 0:
            (self._root / "LATEST").write_text(directory.name)

    def close(self) -> None:
        """Nothing is held."""


def _local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _fill(made: SimpleNamespace, saved: dict[str, torch.Tensor]) -> None:
    for name, value in state.tensors_of(made).items():
        _local(value).copy_(saved[name])


def _recognised(made: SimpleNamespace, step: int, rows: int) -> Loaded:
    known = state.digest(made, tensors_only=True) == state.expected(step, rows, tensors_only=True)
    return Loaded(step, step if known else None)


OURS = (Ours("safetensors"), Ours("torch_save"), Ours("safetensors", "hf"))
OURS_ASYNC = tuple(replace(subject, is_async=True) for subject in OURS)
OURS_INCREMENTAL = (
    Ours("safetensors", incremental=True),
    Ours("safetensors", is_async=True, incremental=True),
)
BASELINES = (PlainDcp(), PlainSafetensors())


def all_ranks(values: list[Any]) -> Any:
    """The value that all ranks agree on; None where they do not."""
    return values[0] if all(value == values[0] for value in values) else None
