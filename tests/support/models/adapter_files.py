"""Side files of adapters, as few as there can be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from automodel_ckpt.checkpoint.export.plan import BaseMaps


class AdapterFiles:
    """Assets of a model that is stored and exported as adapters."""

    file_index_mapping: Mapping[str, int] = {}
    maps = BaseMaps(is_adapter=True)
    files: Mapping[str, bytes] = {"adapter_config.json": b"{}"}
    nbytes = 2

    def write(self, directory: Path) -> None:
        directory.mkdir()
        (directory / "adapter_config.json").write_bytes(b"{}")
