"""The values of one save: its request and state, what a rank proposes to the others, and the report of its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.discovery import Item
from automodel_ckpt.checkpoint.formats import hf
from automodel_ckpt.checkpoint.formats.description import TreeDescription
from automodel_ckpt.checkpoint.formats.planning import TreePlan
from automodel_ckpt.checkpoint.formats.tree_layout import TreeLayout
from automodel_ckpt.checkpoint.manifest import StateRecord
from automodel_ckpt.checkpoint.saving.agreement import TreeSummary
from automodel_ckpt.checkpoint.saving.staging import Staging
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps
from automodel_ckpt.checkpoint.writing.file_groups import FileGroups
from automodel_ckpt.checkpoint.writing.reuse import Previous
from automodel_ckpt.errors import AutomodelError


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save. *published* is false for an asynchronous save in progress: only its stall is known.

    Training waits for *stall_seconds*; the checkpoint is published after *total_seconds* (wall time). *nbytes* are
    those of all its files, *pruned* the checkpoints that the keep policy removed. *export* is the directory of the
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


@dataclass(slots=True)
class Proposal:
    """What a rank sends to the others before a save.

    *trees* summarizes its trees, by name; *digests* are those of its other state. With ``checkpoint.files_per_node``,
    *node* is the identity of its node, and *sizes* are the bytes of its other state. Only rank 0 sends the others:
    *staging*, the path that it created; *maps* and *tied*, which name and split the files that all ranks write
    together, by tree; *previous*, its choice of a checkpoint whose files are shared.
    """

    trees: dict[str, TreeSummary]
    digests: dict[str, str]
    dp_rank: int
    staging: str | None = None
    maps: dict[str, BaseMaps] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    previous: Previous | None = None
    node: str = ""
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Save:
    """One save, from its request to its publication. The first fields are the arguments of :meth:`Checkpointer.save`.

    The others are the state of this rank: *items*; a plan per tree (module or optimizer); the value of each other
    object; *tied* names by module; *file_layouts* of the modules whose files all ranks write together; *metadata*,
    the bytes of DCP's ``.metadata`` by tree, which depend on the plan only; *records*, how each attribute is stored;
    *descriptions* of the trees, with *replicated*, the digests of what only one rank stores, until the plan is made;
    *layouts*, the order of their tensors in the files; *previous*, the checkpoint whose files are shared; *groups*, the
    ranks that write into one file, *contents*, the bytes of objects, and *bundled*, those of which a file has the state
    of several ranks (all three only with ``checkpoint.files_per_node``).
    While a synchronous save is written, *total_bytes* is about what this rank writes, and *bytes_before* the value of
    ``METER.nbytes`` at the start.
    """

    name: layout.CheckpointName
    config_yaml: str
    losses: dict[str, Any]
    progress: dict[str, Any]
    validated: bool
    last: bool
    before_publishing: Callable[[], None] | None
    on_saved: Callable[[SaveReport], None] | None
    started: float
    staging: Staging = field(default_factory=Staging)
    items: list[Item] = field(default_factory=list)
    trees: dict[str, TreePlan] = field(default_factory=dict)
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    file_layouts: dict[str, hf.FileLayout] = field(default_factory=dict)
    metadata: dict[str, bytes] = field(default_factory=dict)
    records: dict[str, StateRecord] = field(default_factory=dict)
    descriptions: dict[str, TreeDescription] = field(default_factory=dict)
    replicated: dict[str, dict[str, str]] = field(default_factory=dict)
    layouts: dict[str, TreeLayout] = field(default_factory=dict)
    previous: Previous | None = None
    groups: FileGroups | None = None
    contents: dict[str, bytes] = field(default_factory=dict)
    bundled: list[str] = field(default_factory=list)
    bytes_before: int = 0
    total_bytes: int | None = None
    stall_seconds: float | None = None
    is_published: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of the state of each object in *contents*."""
        return {name: len(data) for name, data in self.contents.items()}

    def reuse_plan(self, previous: Save) -> None:
        """Take the plan of a previous save, whose state has the same names, shapes, dtypes and placements."""
        self.trees, self.tied = previous.trees, previous.tied
        self.file_layouts, self.metadata = previous.file_layouts, previous.metadata
        self.layouts, self.groups = previous.layouts, previous.groups


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """*values* with NaN and infinities as text, which JSON cannot express as numbers."""
    converted = dict(values)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            converted[name] = str(value)
    return converted
