"""What is tested: this project's checkpoints, and two plain ways of saving to compare them with."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from automodel_ckpt.checkpoint.sources.source import BaseMaps
from tools.crash import state
from tools.crash.pair import Outcome

GENERATION = 100_000
"""A step saved again by a later run holds the state ``step + GENERATION * generation``."""


@dataclass(frozen=True)
class Options:
    """How a run saves. *generation* tells the states of the same step apart."""

    keep_last: int | None = None
    restore_from: str | None = None
    save_consolidated: bool = False
    generation: int = 0

    def seed(self, step: int) -> int:
        return step + GENERATION * self.generation


@dataclass(frozen=True)
class Loaded:
    """What a start found: the step, and the number with the same state, bit for bit, on this rank; None: no number."""

    step: int
    seed: int | None


@dataclass(frozen=True)
class Subject:
    """A way of saving; *name* is its heading in the comparison, *keys* are options of CheckpointOptions."""

    name: str
    session: "type[Session]"
    keys: tuple[tuple[str, Any], ...] = ()
    rows: int = 1
    """How large the tensors are; see :func:`tools.crash.state.build`."""

    @property
    def is_ours(self) -> bool:
        return self.session is OursSession


class Session:
    """A run of a program in the directory *root*: it may load what is there, then save. All ranks take part."""

    def __init__(self, root: Path, options: Options, subject: Subject) -> None:
        self.root, self.options, self.rows = root, options, subject.rows
        self.made = state.build(0, self.rows)

    def load(self) -> Loaded | None:
        raise NotImplementedError

    def save(self, step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held."""

    def loaded(self, step: int, seeds: Sequence[int], *, tensors_only: bool = False) -> Loaded:
        """Which of the *seeds* the loaded state is of."""
        found = state.digest(self.made, tensors_only=tensors_only)
        for seed in seeds:
            if state.expected(seed, self.rows, tensors_only=tensors_only) == found:
                return Loaded(step, seed)
        return Loaded(step, None)


class SideFiles:
    """What an export needs in addition to the weights."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.nbytes = sum(map(len, files.values()))
        self.maps = BaseMaps()
        self.file_index_mapping: dict[str, int] = {}

    def write(self, directory: Path) -> None:
        directory.mkdir()
        for name, data in self.files.items():
            (directory / name).write_bytes(data)


class OursSession(Session):
    """This project's Checkpointer."""

    def __init__(self, root: Path, options: Options, subject: Subject) -> None:
        super().__init__(root, options, subject)
        chosen = CheckpointOptions(
            save_consolidated=options.save_consolidated,
            restore_from=options.restore_from,
            keep_last=options.keep_last,
            **{"incremental": False, **dict(subject.keys)},
        )
        assets: Any = SideFiles({"config.json": b'{"model_type": "tiny"}'})
        self._checkpointer = Checkpointer(root, options=chosen, assets={"model": assets})

    def load(self) -> Loaded | None:
        resumed = self._checkpointer.load(discover(self.made))
        if resumed is None:
            return None
        return self.loaded(resumed.step, (resumed.step, resumed.step + GENERATION))

    def save(self, step: int) -> None:
        self.made = state.build(self.options.seed(step), self.rows)
        self._checkpointer.save(
            discover(self.made),
            step=step,
            epoch=0,
            config_yaml="seed: 1\n",
            # Each checkpoint is better than those before.
            losses={"step": step, "val_loss": 1.0 / step},
            progress={"consumed_samples": step},
            validated=True,
        )
        self._checkpointer.wait_for_save()

    def close(self) -> None:
        self._checkpointer.close()


class DcpSession(Session):
    """torch.distributed.checkpoint.save into one directory, as its tutorial does: each save overwrites the last."""

    def load(self) -> Loaded | None:
        path = self.root / "checkpoint"
        if not path.exists():
            return None
        tensors = state.tensors_of(self.made) | {"step": torch.tensor(0)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(tensors, checkpoint_id=path)
        step = int(tensors["step"])
        return self.loaded(step, [step], tensors_only=True)

    def save(self, step: int) -> None:
        tensors = state.tensors_of(state.build(step, self.rows)) | {"step": torch.tensor(step)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overwriting is what is compared
            dcp_save(tensors, checkpoint_id=self.root / "checkpoint")


class SafetensorsSession(Session):
    """safetensors' save_file by each rank into a directory per step, then its name into a text file LATEST."""

    @property
    def _file(self) -> str:
        return f"rank_{dist.get_rank() if dist.is_initialized() else 0}.safetensors"

    def load(self) -> Loaded | None:
        latest = self.root / "LATEST"
        if not latest.exists():
            return None
        name = latest.read_text()
        saved = load_file(self.root / name / self._file)
        for key, value in _local(self.made).items():
            value.copy_(saved[key])
        step = int(name.removeprefix("step_"))
        return self.loaded(step, [step], tensors_only=True)

    def save(self, step: int) -> None:
        directory = self.root / f"step_{step}"
        directory.mkdir(parents=True, exist_ok=True)
        tensors = _local(state.build(step, self.rows))
        save_file({k: v.contiguous() for k, v in tensors.items()}, directory / self._file)
        if dist.is_initialized():
            dist.barrier()
        if not dist.is_initialized() or dist.get_rank() == 0:
            (self.root / "LATEST").write_text(directory.name)


def _local(made: SimpleNamespace) -> dict[str, torch.Tensor]:
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach()
        for name, value in state.tensors_of(made).items()
    }


def _ours(name: str, **keys: Any) -> Subject:
    return Subject(f"automodel_ckpt {name}", OursSession, tuple(keys.items()))


_FORMATS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "torch_save": {"model_save_format": "torch_save"},
    "hf": {"model_layout": "hf"},
}
OURS = tuple(_ours(name, **keys) for name, keys in _FORMATS.items())
OURS_ASYNC = tuple(
    _ours(f"{name}, asynchronous", **keys, is_async=True) for name, keys in _FORMATS.items()
)
OURS_INCREMENTAL = (
    _ours("safetensors, incremental", incremental=True),
    _ours("safetensors, asynchronous, incremental", is_async=True, incremental=True),
)
"""They share the file of the frozen parameter with the checkpoint before."""
BASELINES = (
    Subject("torch DCP, in place", DcpSession),
    Subject("safetensors + LATEST", SafetensorsSession),
)
NO_START, RANKS_DIFFER, NOTHING = "no start", "ranks differ", "starts from nothing"
MIXTURE = "a mixture, unnoticed"


def failed(what: str, outcomes: Sequence[Outcome]) -> list[str]:
    numbered = enumerate(outcomes)
    return [f"{what} on rank {n}: {o.traceback or 'died'}" for n, o in numbered if not o.ok]


def found(outcomes: Sequence[Outcome]) -> tuple[str, Loaded | None]:
    """What the starts of all ranks found: (what is wrong with it, else an empty text; what was loaded)."""
    if failed("", outcomes):
        return NO_START, None
    first, *others = [outcome.value for outcome in outcomes]
    if any(other != first for other in others):
        return RANKS_DIFFER, None
    if first is None:
        return NOTHING, None
    return (MIXTURE if first.seed is None else ""), first
