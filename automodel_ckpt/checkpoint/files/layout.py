"""The names in a run directory and in a checkpoint: making and parsing them, without file access."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol
from urllib.parse import quote

# In a checkpoint (docs/format.md).
MANIFEST = "MANIFEST.json"
CONFIG = "config.yaml"
LOSSES = "losses.json"
PARTS = ".parts"
"""The directory of the rank manifests. Only a checkpoint that is being written has it."""
RESERVED = frozenset({MANIFEST, CONFIG, LOSSES, PARTS})
"""Names in a checkpoint that no attribute can have."""
AVERAGE = "ema"
"""The attribute with the average of the weights of ``model``, and its directory in a checkpoint."""

# In the directory of a module or optimizer in a checkpoint.
HF_METADATA = ".hf_metadata"
"""The side files of an export, such as config.json and the tokenizer's, next to the shards of a model."""
CONSOLIDATED = "consolidated"
MERGED = "merged"
EXPORTS = frozenset({CONSOLIDATED, MERGED})
"""Exports as Hugging Face files: of the model, and of an adapter merged with its base."""
EXPORT_MANIFEST = "export_manifest.json"
HF_INDEX = "model.safetensors.index.json"
CONSOLIDATE_SCRIPT = "consolidate.sh"
ADAPTER_MODEL = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
AUTOMODEL_PEFT_CONFIG = "automodel_peft_config.json"
"""What peft's files do not contain of an adapter, such as the digest of its base."""
ADAPTER_MODEL_CONFIG = "model_config.json"
"""The config of a model with adapters and its own head. peft would take a config.json for the config of a
complete model in the same directory."""
DCP_METADATA = ".metadata"
SLICE_TABLE = ".slices"
FURTHER_BITS = "further_bits"
"""The name, in the state of an optimizer, of what a float32 weight has in addition to its bfloat16 parameter."""
# The kinds of tensors that do not train, in names of their files.
BUFFERS, FROZEN = "buffers", "frozen"

# In a run directory: logs, and links to checkpoints.
LATEST, LOWEST_VAL = "LATEST", "LOWEST_VAL"
POINTERS = (LATEST, LOWEST_VAL)
PIN = "pin-"
"""The prefix of a link to a checkpoint that no keep policy removes."""
TRAINING_LOG, VALIDATION_LOG = "training.jsonl", "validation.jsonl"
TEXT_LOG = "log.txt"
TIMELINE_LOG, TIMELINE_STATE = "timeline.jsonl", ".timeline.json"
HANGS = "hangs"
"""Stacks of the ranks at steps that did not end."""
AVERAGED = "averaged"
"""The average of the last checkpoints (``checkpoint.average_last``)."""

# In a run directory: records, each read and written by one module of ``run/`` or ``memory/``.
LATE_VALIDATIONS = "late_validations.json"
VERIFIED = ".verified.json"
MEMORY = ".memory.json"
GENERATION = ".generation.json"
LOCK_FILE = ".run.lock"
SAVE_REQUEST, SAVE_ANSWER = ".save-request", ".save-answer.json"
"""A request for a save of the live run, and what became of the last one."""
HUB_EXPORT = "hub"
"""The name in the staging directory of an export that is made in a run directory to be uploaded to the Hub."""

Scope = Literal["replicated", "dp_rank", "rank_rng", "rank"]
"""Where the state of an object may differ, so that each has a file: nowhere (``replicated``), between data-parallel
ranks, or between all ranks; ``rank_rng`` are random numbers, which a load restores last."""

# No leading zeros, so that a step has one name; at most 18 digits, which fit into 64 bits.
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
_UPLOAD_RECORD = re.compile(
    r"\.(?:remote|remote-part|remote-start|hub|"
    r"upload-epoch_[0-9]+_step_[0-9]+(?:\.superseded-[0-9]+)?)\.json",
    re.ASCII,
)
"""Files of the processes that upload a run (``remote/``, ``hub/``)."""


class CheckpointName(NamedTuple):
    """The step and epoch in the name of a checkpoint directory. Ordered by step, then epoch."""

    step: int
    epoch: int

    def __str__(self) -> str:
        return f"epoch_{self.epoch}_step_{self.step}"


class RankLayout(Protocol):
    """The global ``rank`` of a process in ``world_size``, and its data-parallel ``dp_rank`` in ``dp_size``."""

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
    """Parse ``epoch_E_step_S``; None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    return CheckpointName(step=int(match[2]), epoch=int(match[1])) if match else None


def superseded_name(name: str, number: int) -> str:
    """Return the name of an abandoned checkpoint; *number* counts from 1."""
    return f"{name}.superseded-{number}"


def is_superseded(name: str) -> bool:
    """Whether this is the name of an abandoned checkpoint."""
    return name_before(name) is not None


def name_before(superseded: str) -> str | None:
    """Return the name that an abandoned checkpoint had before; None when *superseded* is not such a name."""
    match = _SUPERSEDED.fullmatch(superseded)
    return match[1] if match else None


def is_checkpoint(name: str) -> bool:
    """Whether this is the name of a checkpoint, abandoned or not."""
    return parse_checkpoint_name(name) is not None or is_superseded(name)


def staging_name(name: str, unique: str) -> str:
    """Return the name of a staging directory; *unique* is 32 hexadecimal digits."""
    return f".{name}.staging-{unique}"


def is_staging(name: str) -> bool:
    """Whether this is the name of a staging directory."""
    return staged_name(name) is not None


def staged_name(name: str) -> str | None:
    """Return the checkpoint name of a staging directory; None for any other name."""
    match = _STAGING.fullmatch(name)
    return match[1] if match else None


def export_of(name: str) -> str | None:
    """Return the export, ``consolidated`` or ``merged``, of a temporary export directory; None for any other name."""
    match = _EXPORT_LEFTOVER.fullmatch(name)
    return match[1] if match else None


def is_export_leftover(name: str) -> bool:
    """Whether this is the name of an export that is staged or being replaced."""
    return export_of(name) is not None


def trash_name() -> str:
    """Return a new name of a directory that is being removed."""
    return f".trash-{uuid.uuid4().hex}"


def is_trash(name: str) -> bool:
    """Whether this is the name of a directory that is being removed."""
    return _TRASH.fullmatch(name) is not None


def link_name() -> str:
    """Return a new temporary name of a user's link that is being changed."""
    return f".link-{uuid.uuid4().hex}"


def is_link_name(name: str) -> bool:
    """Whether this is the temporary name of a user's link."""
    return _LINK.fullmatch(name) is not None


def is_temporary(name: str) -> bool:
    """Whether this is the temporary name of a file or link in the run directory, before it is renamed."""
    match = _TEMPORARY.fullmatch(name)
    if match is None:
        return False
    stem = match[1].removesuffix(".txt")
    # Leftovers are removed: any other name that begins with a dot belongs to the user.
    logs = (TRAINING_LOG, VALIDATION_LOG, TIMELINE_LOG)
    files = (LATE_VALIDATIONS, VERIFIED, MEMORY, GENERATION, TIMELINE_STATE, SAVE_ANSWER, *logs)
    is_record = stem in (*POINTERS, *files) or _UPLOAD_RECORD.fullmatch(stem) is not None
    return is_record or f".{stem}" == LOCK_FILE or is_pin(stem)


def is_pin(name: str) -> bool:
    """Whether this is the name of a pin: the prefix, followed by the name of a checkpoint."""
    pinned = name.removeprefix(PIN)
    return name != pinned and is_checkpoint(pinned)


def sibling(directory: Path) -> Path:
    """Return the run directory for another model: ``runs/a``, ``runs/a.sibling-1``, ``runs/a.sibling-2``, ..."""
    match = _SIBLING.fullmatch(directory.name)
    name, number = (match[1], int(match[2])) if match else (directory.name, 0)
    return directory.with_name(f"{name}.sibling-{number + 1}")


def escape_key(key: object) -> str:
    """Escape a dict key for a file name: all characters except letters, digits, ``_`` and ``-`` become ``%XX``."""
    # quote() keeps these two. An unescaped dot would look like the end of the attribute's name.
    return quote(str(key), safe="").replace(".", "%2E").replace("~", "%7E")


def state_directory(attribute: str) -> str:
    """Return the directory of a module or optimizer attribute: its name, or ``optim`` for ``optimizer``."""
    return "optim" if attribute == "optimizer" else attribute


def state_file(attribute: str) -> str:
    """Return the file of an object with the same state on all ranks."""
    return f"{attribute}.pt"


def rank_file(attribute: str, scope: Scope, rank: int, dp_rank: int, *, only_dp: bool) -> str:
    """Return a rank's file of an object with a different state per rank. *only_dp*: all ranks are data-parallel."""
    if scope == "dp_rank" or (scope == "rank_rng" and only_dp):
        return f"{attribute}/{attribute}_dp_rank_{dp_rank}.pt"
    return f"{attribute}/{attribute}_global_rank_{rank}.pt"


def shard_file(
    directory: str, rank: int, file_index: int, num_files: int, *, kind: str = "model"
) -> str:
    """Return the name of a safetensors shard. *rank* counts from 0, *file_index* from 1; in names both count from 1.

    The *kind* is ``model``, or the kind of tensors that do not train (``frozen``, ``buffers``).
    """
    # The names of PyTorch's HuggingFaceStorageWriter: PyTorch's reader of them can read these files.
    return f"{directory}/shard-{rank + 1:05}-{kind}-{file_index:05}-of-{num_files:05}.safetensors"


def objects_file(directory: str, rank: int) -> str:
    """Return the file of a rank's non-tensor values of a module in safetensors format."""
    return f"{directory}/objects-{rank + 1:05}.bin"


def distcp_file(directory: str, rank: int) -> str:
    """Return a rank's file in PyTorch's DCP format."""
    return f"{directory}/__{rank}_0.distcp"


def slice_table_file(directory: str) -> str:
    """Return the file of the slice table of the tree in *directory*."""
    return f"{directory}/{SLICE_TABLE}"


def tables_first(files: Iterable[str]) -> list[str]:
    """Sort files by name, slice tables before all others: who has them can read the slices of the others."""
    return sorted(files, key=lambda file: (not file.endswith(f"/{SLICE_TABLE}"), file))


def rank_manifest_file(rank: int) -> str:
    """Return the file of a rank's manifest, which rank 0 merges."""
    return f"{PARTS}/rank_{rank:05}"


def unsafe_path(path: str) -> str | None:
    """Return why a path that was read from a checkpoint is not safe; None for a relative path inside of it."""
    # A lone surrogate, which JSON can contain, cannot be encoded as UTF-8.
    if any(each in "\0\\" or "\ud800" <= each <= "\udfff" for each in path):
        return "it has a character that no file name of a checkpoint has"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "it is not a plain relative path"
    return None
