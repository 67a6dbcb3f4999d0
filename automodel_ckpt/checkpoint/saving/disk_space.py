"""The expected size of a run's checkpoints, and whether the disk has space for one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.jobs.reuse import ReusableFiles
from automodel_ckpt.checkpoint.parts.discovery import Item
from automodel_ckpt.checkpoint.saving.forecast import Forecast, forecast_bytes, free_bytes
from automodel_ckpt.checkpoint.saving.settings import SaveSettings
from automodel_ckpt.checkpoint.state.module_tensors import untrained_names
from automodel_ckpt.errors import CheckpointUnusable, SaveFailed


class DiskSpace:
    """Forecasts of the saves with *settings*."""

    def __init__(self, settings: SaveSettings) -> None:
        self._settings = settings

    def forecast(
        self, items: Iterable[Item], states: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Forecast:
        """The expected bytes of one save of *items*, and the free bytes."""
        items = list(items)
        side_bytes = sum(assets.nbytes for assets in self._settings.assets.values())
        expected = forecast_bytes(
            items,
            world_size=self._settings.ranks.world_size,
            save_optimizer=self._settings.save_optimizer,
            num_exports=1 if self._settings.assets and self._settings.export_when == "every" else 0,
            states=states,
            side_bytes=side_bytes,
        )
        export = self._export_bytes(items, states, side_bytes)
        return Forecast(expected, free_bytes(self._settings.run.path), export)

    def _export_bytes(
        self, items: Iterable[Item], states: Mapping[str, Mapping[str, Any]] | None, side_bytes: int
    ) -> int:
        """Expected bytes of the export of one checkpoint."""
        if not self._settings.assets or self._settings.export_when == "never":
            return 0
        modules = [item for item in items if item.name in self._settings.assets]
        return forecast_bytes(
            modules, world_size=1, save_optimizer=False, states=states, side_bytes=side_bytes
        )

    def check_fits(self, forecast: Forecast, items: Iterable[Item]) -> None:
        """Raise :class:`SaveFailed` where the disk has too little space for one checkpoint of *items*.

        The files that it can share with an earlier checkpoint take no space.
        """
        share = 1.0 if self._settings.nodes is None else self._settings.nodes.share
        nbytes = int(forecast.nbytes * share)
        if nbytes <= forecast.free_bytes:
            return
        # Only now: it reads the manifest of the earlier checkpoint.
        nbytes -= self._shared_bytes(items)
        if nbytes <= forecast.free_bytes:
            return
        needed, free = size_text(nbytes), size_text(forecast.free_bytes)
        raise SaveFailed(
            "a checkpoint does not fit on the disk",
            where=str(self._settings.run.path),
            value=f"it needs about {needed}, {free} are free",
            hint="free space (`ckpt prune` removes old checkpoints), set checkpoint.keep_last, "
            "or another checkpoint.checkpoint_dir",
        )

    def _shared_bytes(self, items: Iterable[Item]) -> int:
        """The bytes of the files of frozen parameters that a save of *items* shares with an earlier checkpoint."""
        reusable = ReusableFiles.open(
            self._settings.previous() if self._settings.shares_files else None
        )
        if reusable is None:
            return 0
        frozen = {}
        for item in items:
            if item.kind == "module":
                kinds = untrained_names(item.value)
                frozen[item.name] = {name for name in kinds if kinds[name] == layout.FROZEN}
        try:
            return reusable.shared_bytes(frozen)
        except CheckpointUnusable:
            return 0
