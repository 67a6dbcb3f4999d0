"""The files beside a model's weights, which only rank 0 writes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from automodel_ckpt.checkpoint.export.files import agreeing_config
from automodel_ckpt.checkpoint.export.plan import Plan
from automodel_ckpt.checkpoint.export.script import consolidate_script, no_need_script
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.formats.hf import FileLayout
from automodel_ckpt.checkpoint.jobs.rank_manifest import RankManifest
from automodel_ckpt.checkpoint.parts import commit
from automodel_ckpt.checkpoint.sources.base_maps import MAPS, BaseMaps

_CONFIG = "config.json"


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


def write_for_export(assets: Assets, staging: Path, written: RankManifest, directory: str) -> None:
    """Write ``.hf_metadata/`` and ``consolidate.sh`` beside shards in *directory*. Raises OSError."""
    files = {layout.CONSOLIDATE_SCRIPT: consolidate_script(sys.executable).encode()}
    for name, data in assets.files.items():
        files[f"{layout.HF_METADATA}/{name}"] = data
    _write(staging, written, directory, files)


def write_finished(
    assets: Assets | None, file_layout: FileLayout, staging: Path, written: RankManifest
) -> None:
    """Write the index and, with *assets*, all files that a loader needs, beside Hugging Face files. Raises OSError.

    config.json gets the dtype of the weights. An adapter has neither index nor config.json.
    """
    directory = file_layout.directory
    # The maps are for exports from shards; here the weights are stored as the base stores them.
    side_files: dict[str, bytes] = {}
    if assets is not None:
        side_files = {name: data for name, data in assets.files.items() if name not in MAPS}
    if assets is not None and assets.maps.is_adapter:
        _write(staging, written, directory, side_files)
        return
    plan = Plan(file_layout.files, {}, ())
    files = {layout.HF_INDEX: plan.index(), layout.CONSOLIDATE_SCRIPT: no_need_script().encode()}
    if assets is not None:
        files |= side_files
        where = Path(directory, _CONFIG)
        files[_CONFIG], _ = agreeing_config(files[_CONFIG], plan, assets.maps, where)
    _write(staging, written, directory, files)


def _write(
    staging: Path, written: RankManifest, directory: str, files: Mapping[str, bytes]
) -> None:
    """Write *files* (content by name) in *directory* of the checkpoint, and add them to *written*."""
    for name, data in files.items():
        file = f"{directory}/{name}"
        path = staging / file
        path.parent.mkdir(parents=True, exist_ok=True)
        # This fsyncs the file only; commit.finalize fsyncs its directories before the manifest
        # exists.
        written.files[file] = commit.write_file(path, data)
