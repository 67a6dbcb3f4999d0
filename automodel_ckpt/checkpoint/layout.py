"""The names of a run directory and of a checkpoint, in both directions. Pure: no file is touched."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, Protocol
from urllib.parse import quote

MANIFEST = "MANIFEST.json"
CONFIG = "config.yaml"
LOSSES = "losses.json"
PARTS = ".parts"
RESERVED = frozenset({MANIFEST, CONFIG, LOSSES, PARTS})
"""Names in a checkpoint that no attribute can have."""
HF_METADATA = ".hf_metadata"
CONSOLIDATED = "consolidated"
MERGED = "merged"
EXPORTS = frozenset({CONSOLIDATED, MERGED})
EXPORT_MANIFEST = "export_manifest.json"
HF_INDEX = "model.safetensors.index.json"
CONSOLIDATE_SCRIPT = "consolidate.sh"
ADAPTER_MODEL = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
AUTOMODEL_PEFT_CONFIG = "automodel_peft_config.json"
DCP_METADATA = ".metadata"
LATEST, LOWEST_VAL = "LATEST", "LOWEST_VAL"
TRAINING_LOG, VALIDATION_LOG = "training.jsonl", "validation.jsonl"
POINTERS = (LATEST, LOWEST_VAL)
LATE_VALIDATIONS = "late_validations.json"
VERIFIED = ".verified.json"
LOCK_FILE = ".run.lock"
PIN = "pin-"

Scope = Literal["replicated", "dp_rank", "rank_rng", "rank"]

_CHECKPOINT = re.compile(r"epoch_(0|[1-9][0-9]{0,17})_step_(0|[1-9][0-9]{0,17})", re.ASCII)
_SUPERSEDED = re.compile(r"(epoch_[0-9]+_step_[0-9]+)\.superseded-([1-9][0-9]*)", re.ASCII)
_STAGING = re.compile(r"\.(.+)\.staging-[0-9a-f]{32}", re.ASCII)
_EXPORT_LEFTOVER = re.compile(
    r"\.(consolidated|merged)\.(?:staging|previous)-[0-9a-f]{32}", re.ASCII
)
_SIBLING = re.compile(r"(.+)\.sibling-([1-9][0-9]*)", re.ASCII)
_TRASH = re.compile(r"\.trash-[0-9a-f]{32}", re.ASCII)
_LINK = re.compile(r"\.link-[0-9a-f]{32}", re.ASCII)
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}", re.ASCII)


class CheckpointName(NamedTuple):
    """What a checkpoint directory's name says. Ordered by step, then epoch."""

    step: int
    epoch: int

    def __str__(self) -> str:
        return f"epoch_{self.epoch}_step_{self.step}"


class RankLayout(Protocol):
    """Who a process is among the ranks: global ``rank`` of ``world_size``, data-parallel ``dp_rank`` of ``dp_size``."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def dp_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DataParallelRanks:
    """A :class:`RankLayout` in which every rank is data-parallel; by default a single process."""

    rank: int = 0
    world_size: int = 1

    @property
    def dp_rank(self) -> int:
        return self.rank

    @property
    def dp_size(self) -> int:
        return self.world_size


def parse_checkpoint_name(name: str) -> CheckpointName | None:
    """The step and epoch of ``epoch_E_step_S``, or None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    return CheckpointName(step=int(match[2]), epoch=int(match[1])) if match else None


def superseded_name(name: str, number: int) -> str:
    """Where an abandoned checkpoint is kept aside; *number* counts from 1."""
    return f"{name}.superseded-{number}"


def is_superseded(name: str) -> bool:
    """Whether a checkpoint was set aside under this name."""
    return _SUPERSEDED.fullmatch(name) is not None


def name_before(superseded: str) -> str | None:
    """The name that a checkpoint had before it was set aside under the name *superseded*; None for any other name."""
    match = _SUPERSEDED.fullmatch(superseded)
    return match[1] if match else None


def is_checkpoint(name: str) -> bool:
    """Whether a checkpoint of a run, current or set aside, has this name."""
    return parse_checkpoint_name(name) is not None or is_superseded(name)


def staging_name(name: str, unique: str) -> str:
    """Where a checkpoint is written before it is published; *unique* is 32 hexadecimal digits."""
    return f".{name}.staging-{unique}"


def is_staging(name: str) -> bool:
    """Whether something is being written under this name, or was when it was killed."""
    return _STAGING.fullmatch(name) is not None


def staged_name(name: str) -> str | None:
    """The checkpoint that a staging directory is to become; None for any other name."""
    match = _STAGING.fullmatch(name)
    return match[1] if match else None


def export_of(name: str) -> str | None:
    """The export that a killed one left a directory of this name for: ``consolidated`` or ``merged``; else None."""
    match = _EXPORT_LEFTOVER.fullmatch(name)
    return match[1] if match else None


def is_export_leftover(name: str) -> bool:
    """Whether an export is staged, or is being replaced, under this name, or was when it was killed."""
    return export_of(name) is not None


def trash_name(unique: str) -> str:
    """The name a directory has while it is being removed."""
    return f".trash-{unique}"


def is_trash(name: str) -> bool:
    """Whether something is being removed under this name, or was when it was killed."""
    return _TRASH.fullmatch(name) is not None


def link_name(unique: str) -> str:
    """The name a user's link has while it is being changed to follow its checkpoint."""
    return f".link-{unique}"


def is_link_name(name: str) -> bool:
    """Whether a user's link is being changed under this name, or was when the run was killed."""
    return _LINK.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """Whether a file of the run directory is being written, or a link made, under this name before it gets its own."""
    match = _TEMPORARY.fullmatch(name)
    if match is None:
        return False
    stem = match[1].removesuffix(".txt")
    files = (LATE_VALIDATIONS, VERIFIED, TRAINING_LOG, VALIDATION_LOG)
    return stem in (*POINTERS, *files) or f".{stem}" == LOCK_FILE or is_pin(stem)


def is_pin(name: str) -> bool:
    """Whether a link of this name pins a checkpoint; that one's name follows the prefix."""
    pinned = name.removeprefix(PIN)
    return name != pinned and is_checkpoint(pinned)


def sibling(directory: Path) -> Path:
    """The run directory for another model's checkpoints: ``runs/a``, ``runs/a.sibling-1``, ``runs/a.sibling-2``, ..."""
    match = _SIBLING.fullmatch(directory.name)
    name, number = (match[1], int(match[2])) if match else (directory.name, 0)
    return directory.with_name(f"{name}.sibling-{number + 1}")


def escape_key(key: object) -> str:
    """A dict key as part of a file name: letters, digits, ``_`` and ``-`` stay, all else becomes ``%XX``."""
    return quote(str(key), safe="").replace(".", "%2E").replace("~", "%7E")


def state_directory(attribute: str) -> str:
    """The directory of a module or optimizer attribute: its name, and ``optim`` for ``optimizer``."""
    return "optim" if attribute == "optimizer" else attribute


def state_file(attribute: str) -> str:
    """The file of a replicated object's state."""
    return f"{attribute}.pt"


def rank_file(attribute: str, scope: Scope, ranks: RankLayout) -> str:
    """This rank's file of an object whose state differs between ranks."""
    if scope == "dp_rank" or (scope == "rank_rng" and ranks.dp_size == ranks.world_size):
        return f"{attribute}/{attribute}_dp_rank_{ranks.dp_rank}.pt"
    return f"{attribute}/{attribute}_global_rank_{ranks.rank}.pt"


def shard_file(directory: str, rank: int, file_index: int, num_files: int) -> str:
    """A rank's safetensors shard; *rank* counts from 0, *file_index* from 1 (the names count both from 1)."""
    return f"{directory}/shard-{rank + 1:05}-model-{file_index:05}-of-{num_files:05}.safetensors"


def objects_file(directory: str, rank: int) -> str:
    """Where a rank keeps the non-tensor values of a module in safetensors format."""
    return f"{directory}/objects-{rank + 1:05}.bin"


def distcp_file(directory: str, rank: int) -> str:
    """A rank's file in PyTorch DCP's own format."""
    return f"{directory}/__{rank}_0.distcp"


def part_file(rank: int) -> str:
    """What a rank wrote, for rank 0 to merge into the manifest."""
    return f"{PARTS}/rank_{rank:05}.json"


def unsafe_path(path: str) -> str | None:
    """Why a path read from a checkpoint may not be followed inside it, or None for a plain relative path."""
    if "\0" in path:
        return "it contains a NUL byte"
    if any("\ud800" <= character <= "\udfff" for character in path):
        return "it is not valid Unicode"
    if not path or path.startswith("/") or "\\" in path:
        return "it is not a relative path"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it has an empty, '.' or '..' component"
    return None if PurePosixPath(path).as_posix() == path else "it is not normalized"
