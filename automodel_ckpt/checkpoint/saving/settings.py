"""Where and how the checkpoints of a run are saved: :class:`SaveSettings`, which saves, loads and exports share."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.jobs.reuse import Previous
from automodel_ckpt.checkpoint.options import CheckpointOptions, ModelFormat, ModelLayout
from automodel_ckpt.checkpoint.run.directory import RunDirectory
from automodel_ckpt.checkpoint.sources.base_maps import BaseMaps

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.memory.nodes import Nodes


class Assets(Protocol):
    """What an export needs beside the weights (:class:`~automodel_ckpt.checkpoint.export.hf_assets.HFAssets`)."""

    @property
    def file_index_mapping(self) -> Mapping[str, int]: ...
    @property
    def maps(self) -> BaseMaps: ...
    @property
    def files(self) -> Mapping[str, bytes]: ...
    @property
    def nbytes(self) -> int: ...


class SaveSettings:
    """The directory *run*, the *ranks* that save in it, and what *options* say about files.

    *assets* has what the exports of modules need, by attribute name. Entries may be added before the first save.
    *options* are those of :class:`~automodel_ckpt.checkpoint.checkpointer.Checkpointer`.
    """

    def __init__(
        self,
        run: RunDirectory,
        ranks: layout.RankLayout,
        assets: dict[str, Assets],
        options: CheckpointOptions,
    ) -> None:
        self.run, self.ranks, self.assets = run, ranks, assets
        self.save_optimizer = options.save_optimizer
        self.notes: dict[str, str] = {}
        """What manifests contain in ``environment`` beside packages and hardware, by name."""
        self.resumed_from: str | None = None
        """The name of the checkpoint that was loaded last; None in a new run."""
        self.restore_from = options.restore_from
        self.model_format: ModelFormat = options.model_save_format
        self.model_layout: ModelLayout = options.model_layout or "shards"
        self.incremental = options.incremental
        self.export_when = export_when(
            options.save_consolidated, self.model_format, self.model_layout
        )
        """Which checkpoints are exported: ``final``, ``every`` or ``never``."""
        self.nodes: Nodes | None = None
        """The nodes over whose directories checkpoints are distributed; None if all ranks share the run directory."""

    def use_nodes(self, nodes: Nodes) -> None:
        """Distribute checkpoints over the directories of *nodes*. No file then has parts of ranks on different nodes,
        and nothing is exported: no node has all files."""
        self.nodes = nodes
        self.model_layout = "shards"
        self.incremental = False
        self.export_when = "never"

    @property
    def shares_files(self) -> bool:
        """Whether saves of this format and layout can share files with earlier checkpoints."""
        has_shards = self.model_layout == "shards" and self.model_format == "safetensors"
        return has_shards and self.incremental is not False

    def previous(self) -> Previous | None:
        """The checkpoint whose files the next save can share, where hard links are supported; None if there is none.

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
