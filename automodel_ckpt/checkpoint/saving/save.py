"""The settings of all saves; of one save its size, request and state, what ranks propose to the others, its report."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.checkpoint.export.plan import BaseMaps
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, ValueDict, Values
from automodel_ckpt.checkpoint.formats.planning import (
    Mesh,
    TreeDescription,
    TreePlan,
)
from automodel_ckpt.checkpoint.jobs.reuse import Previous
from automodel_ckpt.checkpoint.options import CheckpointOptions, ModelLayout
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.parts.manifest import StateRecord
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.saving.adapter_assets import AdapterAssets
from automodel_ckpt.checkpoint.state.module_tensors import (
    check_flat,
    module_state,
    stored_layout,
    trained_by_all,
)
from automodel_ckpt.checkpoint.state.storable import check_safe, saved
from automodel_ckpt.errors import AutomodelError, SaveFailed
from automodel_ckpt.parallel.ranks import agree

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.memory.nodes import Nodes

Assets = HFAssets | AdapterAssets
"""What an export needs in addition to the weights."""


class SaveSettings:
    """The directory *run*, the *ranks* of *group* that save in it, and what *options* say about files.

    *assets* has what the exports of modules need, by attribute name. Entries may be added before the first save.
    *options* are as in :class:`~automodel_ckpt.checkpoint.checkpointer.Checkpointer`.
    """

    def __init__(
        self,
        run: RunDirectory,
        ranks: layout.RankLayout,
        assets: dict[str, Assets],
        options: CheckpointOptions,
        group: ProcessGroup | None = None,
    ) -> None:
        self.run, self.ranks, self.assets, self.group = run, ranks, assets, group
        self.is_rank0 = ranks.rank == 0
        self.options = options
        self.notes: TextDict = {}
        """What manifests contain in ``environment`` in addition to packages and hardware, by name."""
        self.resumed_from: str | None = None
        """The name of the checkpoint that was loaded last; None in a new run."""
        self.model_layout: ModelLayout = options.model_layout or "shards"
        self.incremental = options.incremental
        self.export_when = export_when(
            options.save_consolidated, options.model_save_format, self.model_layout
        )
        """Which checkpoints are exported: ``final``, ``every`` or ``never``."""
        self.nodes: Nodes | None = None
        """The nodes that checkpoints are distributed over. None when all ranks share the run directory."""

    def raise_on_all_ranks(
        self, doing: str, kind: type[AutomodelError] = SaveFailed
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that raises on all ranks what its block raises on one, as an error of *kind*."""
        failure = partial(as_failure, doing=doing, where=self.run.path, kind=kind)
        return agree.raise_on_all_ranks(self.group, failure)

    def use_nodes(self, nodes: Nodes) -> None:
        """Distribute checkpoints over the directories of *nodes*. No file then has parts of ranks on different nodes,
        and nothing is exported: no node has all files."""
        self.nodes = nodes
        self.model_layout = "shards"
        self.incremental = False
        self.export_when = "never"

    def use_adapter_file(self) -> None:
        """Write adapters as peft does, unless the options state a layout or a format."""
        options = self.options
        is_safetensors = options.model_save_format == "safetensors"
        if options.model_layout is None and is_safetensors and not self.nodes:
            self.model_layout = "adapter"
            self.export_when = "never"

    @property
    def shares_files(self) -> bool:
        """Whether saves of this format and layout can share files with earlier checkpoints."""
        has_shards = self.model_layout == "shards"
        is_safetensors = self.options.model_save_format == "safetensors"
        return has_shards and is_safetensors and self.incremental is not False

    def previous(self) -> Previous | None:
        """The next save can share files of this checkpoint, where hard links are supported. None when there is none.

        By default it is not the one before: after damage to one of the newest two checkpoints, a start uses the other.
        """
        names = self.run.continued()
        avoid = next(names, None) if self.incremental == "auto" else None
        name = next(names, None)
        if name is None:
            return None
        root = str(self.run.root / name)
        return Previous(root, None if avoid is None else str(self.run.root / avoid))

    def export_command(self, path: Path) -> str | None:
        """The shell command that exports a checkpoint as Hugging Face files; None where there is nothing to export."""
        if not self.assets or self.model_layout != "shards" or self.nodes is not None:
            return None
        return f"ckpt consolidate {shlex.quote(str(path))}"

    @property
    def model_files_are_the_export(self) -> bool:
        """Whether a checkpoint's own model files are what other programs load, so that no export is made."""
        return self.model_layout != "shards"

    def makes_export(self, last: bool) -> bool:
        """Whether a save is exported too; *last*: it is the last one of a run."""
        if not self.assets:
            return False
        return self.export_when == "every" or (self.export_when == "final" and last)


def export_when(save_consolidated: bool | str | None, model_format: str, model_layout: str) -> str:
    """Which checkpoints are exported: ``final``, ``every`` or ``never``."""
    if model_layout != "shards":
        return "never"
    if save_consolidated is None:
        return "final" if model_format == "safetensors" else "never"
    if isinstance(save_consolidated, bool):
        return "every" if save_consolidated else "never"
    return save_consolidated


class Staging:
    """The staging directory of a save; it is created by :meth:`reserve`.

    Rank 0 owns the directory from its creation until its checkpoint is published. Any failure in between, on any rank,
    must end in :meth:`remove`. On other ranks only :attr:`path` is used; but if each node has its own directory, one
    rank of each owns that.
    """

    def __init__(self) -> None:
        self.path = Path()
        self.is_owner = False

    def reserve(self, root: Path, name: str, directories: Iterable[str]) -> Path:
        """Create the directory for the checkpoint *name* below *root*, with empty *directories* in it.

        Raises OSError, and then leaves no directory.
        """
        self.path = commit.reserve(root, name)
        self.is_owner = True
        try:
            for directory in directories:
                (self.path / directory).mkdir()
        except OSError:
            self.remove()
            raise
        return self.path

    def remove(self) -> None:
        """Delete the directory, if this rank owns one."""
        if self.is_owner:
            commit.discard(self.path)


@dataclass(frozen=True)
class SaveReport:
    """The result of a save. *published* is false for an asynchronous save in progress: only its stall is known.

    Training waits for *stall_seconds*; the checkpoint is published after *total_seconds* (wall time). *nbytes* is
    the size of all its files, *pruned* the checkpoints that the keep policy removed. *export* is the directory of the
    export, where one was made, and *export_failure* the reason where one failed. *export_command* is the shell command
    that exports the checkpoint, None where there is nothing to export.
    """

    path: Path
    step: int
    stall_seconds: float
    total_seconds: float = 0.0
    nbytes: int = 0
    free_bytes: int | None = None
    pruned: tuple[str, ...] = ()
    export: Path | None = None
    export_failure: AutomodelError | None = None
    published: bool = True
    export_command: str | None = None

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.total_seconds if self.total_seconds else 0.0


@dataclass(frozen=True)
class TreeSummary:
    """What each rank sends about a tree: the digest of its description, and the first rank of each mesh."""

    digest: str
    origins: Mapping[Mesh, int]


@dataclass(slots=True)
class Proposal:
    """What a rank sends to the others before a save. Only rank 0 sets the fields from *staging* on."""

    digests: TextDict | None = None
    """The digests of small state, by name. None where this rank cannot use the plan of the previous save."""
    replicated: TextDict = field(default_factory=dict)
    """A digest by tree of what only one rank stores."""
    dp_rank: int = 0
    trees: dict[str, TreeSummary] = field(default_factory=dict)
    """The summary of each tree (module or optimizer), by name; empty with the plan of the previous save."""
    staging: str = ""
    """The path of the staging directory that rank 0 created; empty if it could not."""
    maps: dict[str, BaseMaps] = field(default_factory=dict)
    """How the files that all ranks write together are named and split, by tree."""
    tied: dict[str, TextDict] = field(default_factory=dict)
    """Tied names of the tensors in these files, by tree."""
    previous: Previous | None = None
    """The save shares unchanged files with this earlier checkpoint."""


@dataclass(slots=True)
class Save:
    """One save on this rank, from its request to its publication.

    The first fields are the arguments of :meth:`Checkpointer.save`, and *started*, the time of the call in seconds of
    ``time.monotonic``.
    """

    name: layout.CheckpointName
    config_yaml: str = ""
    losses: ValueDict = field(default_factory=dict)
    progress: ValueDict = field(default_factory=dict)
    validated: bool = False
    last: bool = False
    before_publishing: Callable[[], None] | None = None
    on_saved: Callable[[SaveReport], None] | None = None
    started: float = 0.0

    staging: Staging = field(default_factory=Staging)
    previous: Previous | None = None
    """The save shares unchanged files with this earlier checkpoint. None when there is none."""

    # The state of this rank.
    items: list[Item] = field(default_factory=list)
    """The objects with state, each once."""
    objects: ValueDict = field(default_factory=dict)
    """The state of each object that is no module, optimizer or learning-rate schedule, by name."""
    descriptions: dict[str, TreeDescription] = field(default_factory=dict)
    """What this rank has of each tree. Used until the plan is made."""
    replicated: dict[str, TextDict] = field(default_factory=dict)
    """For each tree, the digests of what only one rank stores, by name."""

    # What is written.
    trees: dict[str, TreePlan] = field(default_factory=dict)
    """What this rank writes of each tree (module or optimizer). Later saves use it again while names, shapes, dtypes
    and placements are the same."""
    records: dict[str, StateRecord] = field(default_factory=dict)
    """How each attribute is stored, by name, for the manifest."""

    # Its progress and result.
    bytes_before: int = 0
    """The value of ``METER.nbytes`` when a synchronous save begins to write."""
    total_bytes: int | None = None
    """About what this rank writes; None except while a synchronous save is written."""
    stall_seconds: float | None = None
    """How long training waited for an asynchronous save; None for a synchronous one."""
    is_published: bool = False


def json_values(values: Values) -> ValueDict:
    """*values* with NaN and infinities as text, which JSON cannot express as numbers."""
    converted = dict(values)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            converted[name] = str(value)
    return converted


# ---------------------------------------------------------------- expected size


# The entries of a tensor in the manifest and in a header; of an optimizer also its archive and entry in .metadata.
_MODULE_ENTRY, _OPTIMIZER_ENTRY = 380, 2000
# The rest of the manifest, config.yaml, losses.json, consolidate.sh; and of each rank, what a header is padded to.
_FIXED_BYTES, _PADDING_BYTES = 10_240, 2048
# The largest extent of the parameter for a trial step.
_TRIAL_EXTENT = 2


@dataclass(frozen=True)
class Forecast:
    """Expected bytes of one save, with its export where each save makes one, and the bytes that are free now."""

    nbytes: int
    free_bytes: int


def forecast_bytes(
    items: Iterable[Item],
    *,
    world_size: int,
    save_optimizer: bool,
    side_bytes: int = 0,
) -> int:
    """Expected bytes of one checkpoint of *items* on *world_size* ranks.

    *side_bytes* is the size of the files other than the weights (config, tokenizer).

    Computed from shapes and dtypes. The state of an optimizer without state is found by a trial step on parameters
    with few elements.
    """
    total = _FIXED_BYTES + side_bytes
    for item in items:
        if item.kind == "module":
            complete = stored_layout(item.value).complete
            # Of all ranks, if this rank has a stage of the module.
            state = module_state(item.value)[0] if complete is None else complete.tensors
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor):
                    # Of the whole tensor, not only of this rank's shard.
                    total += tensor.numel() * tensor.element_size() + _MODULE_ENTRY
            total += world_size * _PADDING_BYTES
        elif item.kind == "optimizer" and save_optimizer:
            total += _optimizer_bytes(item)
        elif item.kind == "object":
            num_files = 1 if item.scope == "replicated" else world_size
            content = item.value.state_dict()
            check_safe(item.name, content)
            total += num_files * len(saved(content))
    return total


def _optimizer_bytes(item: Item) -> int:
    groups, here, total = item.value.param_groups, 0, 0
    for group in groups:
        for parameter in group["params"]:
            here += parameter.numel()
            total += sum(
                nbytes + _OPTIMIZER_ENTRY for nbytes in _state_entries(item, group, parameter)
            )
    if (trained := trained_by_all(item.value)) is None:
        return total
    # This rank trains a part of what all ranks train.
    of_all = sum(tensor.numel() for group in trained for tensor in group.values())
    return int(total * of_all / max(here, 1))


def _state_entries(item: Item, group: ValueDict, parameter: torch.Tensor) -> Iterator[int]:
    """Yield the bytes of each state entry that is a tensor.

    After a trial step, state for each row or column counts as state of the trial's few rows. Raises
    :class:`RecipeError` for state that a checkpoint cannot store.
    """
    optimizer = _optimizer_of(item.value, group)
    state, owner = optimizer.state.get(parameter), parameter
    if not state and hasattr(optimizer, "state_like"):
        # If the state depends on the size of a parameter, the optimizer describes it, in tensors without values.
        state = optimizer.state_like(parameter)
    elif not state:
        shape = [min(extent, _TRIAL_EXTENT) for extent in parameter.shape]
        owner = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device="cpu"))
        state = _state_after_a_step(optimizer, group, owner)
    check_flat(item.name, {"state": {"*": state}, "param_groups": ()})
    for value in state.values():
        if isinstance(value, torch.Tensor):
            is_full = value.dim() and value.numel() == owner.numel()
            numel = parameter.numel() if is_full else value.numel()
            yield numel * value.element_size()


def _optimizer_of(optimizer: Optimizer, group: ValueDict) -> Optimizer:
    """The optimizer that updates *group*: one of those that *optimizer* combines, or *optimizer*."""
    parts = [*getattr(optimizer, "optimizers", ()), optimizer]
    return next(
        (each for each in parts if any(mine is group for mine in each.param_groups)), optimizer
    )


def _state_after_a_step(
    optimizer: Optimizer, group: ValueDict, parameter: torch.Tensor
) -> ValueDict:
    """The state of *parameter* after one step with the optimizer's class and the options of *group*."""
    # LR schedulers add keys to the groups (initial_lr) that the constructor rejects.
    options = {name: value for name, value in group.items() if name in optimizer.defaults}
    try:
        trial = type(optimizer)([parameter], **options)
        parameter.grad = torch.zeros_like(parameter)
        trial.step()
    except Exception:
        # An optimizer that needs more than parameters and its defaults: assume AdamW's two moments.
        return {"first": torch.zeros_like(parameter), "second": torch.zeros_like(parameter)}
    return dict(trial.state[parameter])
