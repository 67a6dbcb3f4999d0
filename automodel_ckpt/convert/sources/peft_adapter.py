"""PEFT adapters: ``adapter_model.safetensors`` beside ``adapter_config.json``."""

from __future__ import annotations

import os
from pathlib import Path

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.sources.format import Format
from automodel_ckpt.convert.sources.hugging_face import source_of_files, tensors_in_file


class PeftAdapter(Format):
    """A directory with the file of an adapter. Its tensors have PEFT's names."""

    name = "PEFT adapter"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        return os.path.lexists(path / layout.ADAPTER_MODEL)

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        export = find_export_manifest(path, follow_links=follow_links)
        names = [layout.ADAPTER_MODEL]
        tensors = tensors_in_file(path, names[0], export, follow_links=follow_links)
        return source_of_files(path, names, tensors, export, follow_links=follow_links)
