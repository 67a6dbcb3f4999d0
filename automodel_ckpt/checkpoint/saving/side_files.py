"""The files beside a model's weights, which only rank 0 writes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from automodel_ckpt.checkpoint import commit, layout
from automodel_ckpt.checkpoint.export.files import agreeing_config
from automodel_ckpt.checkpoint.export.plan import Plan
from automodel_ckpt.checkpoint.export.script import consolidate_script, no_need_script
from automodel_ckpt.checkpoint.formats.hf import FileLayout
from automodel_ckpt.checkpoint.sources.base_maps import MAPS, BaseMaps
from automodel_ckpt.checkpoint.writing.rank_manifest import RankManifest

_CONFIG = "config.json"


class Assets(Protocol):
    """What an export needs beside the weights (:class:`~automodel_ckpt.checkpoint.hf_assets.HFAssets`)."""

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
    _write(
        staging,
        written,
        f"{directory}/{layout.CONSOLIDATE_SCRIPT}",
        consolidate_script(sys.executable).encode(),
    )
    for name, data in assets.files.items():
        _write(staging, written, f"{directory}/{layout.HF_METADATA}/{name}", data)


def write_finished(
    assets: Assets | None, file_layout: FileLayout, staging: Path, written: RankManifest
) -> None:
    """Write the index and, with *assets*, all files that a loader needs, beside Hugging Face files. Raises OSError.

    config.json gets the dtype of the weights. An adapter has neither index nor config.json.
    """
    if assets is not None and assets.maps.is_adapter:
        for name, data in assets.files.items():
            if name not in MAPS:
                _write(staging, written, f"{file_layout.directory}/{name}", data)
        return
    plan = Plan(file_layout.files, {}, ())
    files = {layout.HF_INDEX: plan.index(), layout.CONSOLIDATE_SCRIPT: no_need_script().encode()}
    if assets is not None:
        files |= {name: data for name, data in assets.files.items() if name not in MAPS}
        where = Path(file_layout.directory, _CONFIG)
        files[_CONFIG], _ = agreeing_config(files[_CONFIG], plan, assets.maps, where)
    for name, data in files.items():
        _write(staging, written, f"{file_layout.directory}/{name}", data)


def _write(staging: Path, written: RankManifest, file: str, data: bytes) -> None:
    path = staging / file
    path.parent.mkdir(parents=True, exist_ok=True)
    written.files[file] = commit.write_file(path, data)
