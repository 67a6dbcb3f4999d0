"""What rank 0 adds to the files of all ranks, and the publication of a checkpoint."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.base.durable_io import free_bytes
from automodel_ckpt.checkpoint.export.files import agreeing_config
from automodel_ckpt.checkpoint.export.hf_assets import consolidate_script, no_need_script
from automodel_ckpt.checkpoint.export.plan import Plan
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import FileRecord
from automodel_ckpt.checkpoint.files.type_aliases import Files
from automodel_ckpt.checkpoint.formats.planning import FileLayout
from automodel_ckpt.checkpoint.formats.rank_files import TORCH_SAVE, metadata_of
from automodel_ckpt.checkpoint.jobs.rank_manifest import (
    RankManifest,
    environment,
)
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.parts.failures import as_failure
from automodel_ckpt.checkpoint.parts.manifest import Manifest, Tree
from automodel_ckpt.checkpoint.run import resume
from automodel_ckpt.checkpoint.saving.save import (
    Assets,
    Save,
    SaveReport,
    SaveSettings,
    json_values,
)
from automodel_ckpt.checkpoint.sources.source import MAPS


class Publisher:
    """Completes and publishes the planned saves of a run with *settings*. Calls no collective.

    Rank 0 uses it; the other ranks call only :meth:`report`.
    """

    def __init__(self, settings: SaveSettings) -> None:
        self._settings = settings

    def write_common(self, save: Save, written: RankManifest) -> None:
        """Write the recipe, the losses and the side files of each module, and add them to *written*. Raises OSError."""
        staging = save.staging.path
        losses = json.dumps(json_values(save.losses), indent=2) + "\n"
        files = {layout.CONFIG: save.config_yaml, layout.LOSSES: losses}
        for file, text in files.items():
            written.files[file] = commit.write_file(staging / file, text.encode())
        for name, file_layout in save.plan.file_layouts.items():
            _write_finished(self._settings.assets.get(name), file_layout, staging, written)
        for name, assets in self._settings.assets.items():
            if name not in save.plan.file_layouts:
                _write_for_export(assets, staging, written, save.plan.trees[name].directory)

    def write_metadata(self, save: Save, merged: Callable[[str], Tree]) -> dict[str, FileRecord]:
        """Write DCP's ``.metadata`` of each tree in the format torch_save.

        *merged* returns a tree of the checkpoint, by its name, with the slices of all ranks; it is called only where
        the metadata is new.
        """
        written = {}
        metadata = save.plan.metadata
        for name, tree in save.plan.trees.items():
            if save.plan.formats[name] != TORCH_SAVE:
                continue
            if name not in metadata:
                metadata[name] = metadata_of(tree, merged(name))
            file = f"{tree.directory}/{layout.DCP_METADATA}"
            written[file] = commit.write_file(save.staging.path / file, metadata[name])
        return written

    def partial_manifest(self, save: Save) -> Manifest:
        """The manifest without what the ranks wrote: no files, and of each tree the tensors without records."""
        settings, plan = self._settings, save.plan
        trees = {}
        for name, planned in plan.layouts.items():
            tied = plan.tied.get(name, {})
            trees[name] = Tree(plan.formats[name], planned.tensors, {}, tied, planned.copies)
        request = resume.request_text(self._settings.run.path, settings.restore_from)
        return Manifest(
            step=save.name.step,
            epoch=save.name.epoch,
            # `finalize` sets the time.
            created=0.0,
            world_size=settings.ranks.world_size,
            dp_size=settings.ranks.dp_size,
            progress=save.progress,
            losses=json_values(save.losses),
            validated=save.validated,
            environment=environment() | settings.notes,
            lineage={"restore_from": request, "resumed_from": settings.resumed_from},
            state=save.records,
            trees=trees,
            files={},
        )

    def complete(
        self,
        save: Save,
        common: RankManifest,
        merged: Callable[[str], Tree],
        finish: Callable[[], int],
        pause: Callable[[float], None] = time.sleep,
    ) -> SaveReport:
        """Publish *save* after all ranks have written it.

        *common* is the rank manifest to which the metadata is added, *merged* as in :meth:`write_metadata`. *finish*
        finalizes the checkpoint and returns its bytes. *pause* is called while other nodes are
        waited for, and may raise. Raises OSError where it could not be published.
        """
        common.files.update(self.write_metadata(save, merged))
        if save.before_publishing is not None:
            # A recipe flushes its logs here: no checkpoint is published before the log lines of its step.
            save.before_publishing()
        nbytes = finish()
        nodes = self._settings.nodes
        if nodes is not None:
            # Before rank 0's node: its own checkpoint is the one that the next save continues.
            nodes.publish(save.staging.path, str(save.name), pause)
        report = self._publish(save, nbytes)
        if nodes is not None:
            nodes.remove_others(pause)
        return report

    def _publish(self, save: Save, nbytes: int) -> SaveReport:
        """Publish a finalized checkpoint of *nbytes*, update the pointers, and apply the keep policy.

        Raises OSError where it could not be published.
        """
        losses = json_values(save.losses) if save.validated else {}
        self._settings.run.publish(save.staging.path, save.name, losses)
        # Before anything that can fail: a published checkpoint must not be removed as a staging
        # directory.
        save.staging.is_owner = False
        report = self.report(save)
        # After publishing: until then, the newest old checkpoint is what a resume needs.
        pruned = self._settings.run.prune(str(save.name))
        # The next save or start tries again.
        with contextlib.suppress(OSError):
            from automodel_ckpt.checkpoint.memory.save_files import remove_set_aside

            remove_set_aside(self._settings.run.root)
        return replace(report, nbytes=nbytes, pruned=pruned)

    def notify(self, save: Save, report: SaveReport) -> None:
        """Call ``on_saved`` of *save*. Raises :class:`SaveFailed` for what it raises."""
        if save.on_saved is None:
            return
        try:
            save.on_saved(report)
        except Exception as error:
            raise as_failure(
                error,
                f"reporting {save.name} (the checkpoint itself is safe)",
                self._settings.run.path,
            ) from error

    def report(self, save: Save) -> SaveReport:
        """The report of a completed save on any rank, without its bytes and removed checkpoints."""
        seconds, free = time.monotonic() - save.started, None
        # No collective follows: an error on one rank could not be raised on the others.
        with contextlib.suppress(OSError):
            free = free_bytes(self._settings.run.path)
        stall = seconds if save.stall_seconds is None else save.stall_seconds
        path = self._settings.run.path / str(save.name)
        command = self._settings.export_command(path)
        return SaveReport(
            path, save.name.step, stall, seconds, free_bytes=free, export_command=command
        )


def _write_for_export(assets: Assets, staging: Path, written: RankManifest, directory: str) -> None:
    """Write ``.hf_metadata/`` and ``consolidate.sh`` beside shards in *directory*. Raises OSError."""
    files = {layout.CONSOLIDATE_SCRIPT: consolidate_script(sys.executable).encode()}
    for name, data in assets.files.items():
        files[f"{layout.HF_METADATA}/{name}"] = data
    _write(staging, written, directory, files)


def _write_finished(
    assets: Assets | None, file_layout: FileLayout, staging: Path, written: RankManifest
) -> None:
    """Write the index and, with *assets*, all files that a loader needs, beside Hugging Face files. Raises OSError.

    config.json gets the dtype of the weights. An adapter has neither index nor config.json.
    """
    directory, files = file_layout.directory, {}
    if assets is not None:
        # The maps are for exports from shards; here the weights are stored as the base stores them.
        files = {name: data for name, data in assets.files.items() if name not in MAPS}
    if assets is None or not assets.maps.is_adapter:
        plan = Plan(file_layout.files)
        files[layout.HF_INDEX] = plan.index()
        files[layout.CONSOLIDATE_SCRIPT] = no_need_script().encode()
        if assets is not None:
            config, where = files["config.json"], Path(directory, "config.json")
            files["config.json"], _ = agreeing_config(config, plan, assets.maps, where)
    _write(staging, written, directory, files)


def _write(staging: Path, written: RankManifest, directory: str, files: Files) -> None:
    """Write *files* (content by name) in *directory* of the checkpoint, and add them to *written*."""
    for name, data in files.items():
        file = f"{directory}/{name}"
        path = staging / file
        path.parent.mkdir(parents=True, exist_ok=True)
        # This fsyncs the file only; commit.finalize fsyncs its directories before the manifest
        # exists.
        written.files[file] = commit.write_file(path, data)
