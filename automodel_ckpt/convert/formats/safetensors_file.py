"""A single safetensors file with all tensors of a model."""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.checkpoint.export.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safetensors_header import read_header
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import first_bytes
from automodel_ckpt.convert.formats.format import Format
from automodel_ckpt.convert.formats.hugging_face import (
    source_of_files,
    tensors_in_file,
    weight_map_of,
)
from automodel_ckpt.convert.formats.safetensors_shards import SHARDING_INFO
from automodel_ckpt.errors import CheckpointUnusable


class SafetensorsFile(Format):
    """A file that ends in .safetensors, or begins like one: eight bytes of length, then JSON."""

    name = "a safetensors file"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        if not path.is_file():
            return False
        return path.suffix == ".safetensors" or first_bytes(path, 9)[8:] == b"{"

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        """Describe the model. Raises :class:`CheckpointUnusable` for a file with only a part of a model."""
        directory = path.parent.resolve()
        export = find_export_manifest(directory, follow_links=True)
        weight_map = weight_map_of(directory, export, follow_links=True)
        if weight_map is not None:
            num_files = len(set(weight_map.values()))
            if num_files > 1:
                value = f"one of {num_files}: name the directory"
                raise _incomplete("this file is a part of a model", path, value)
        if SHARDING_INFO in read_header(path).metadata:
            value = "name the directory of the shards"
            raise _incomplete("this file is a rank's shard of a model", path, value)
        if path.name == layout.ADAPTER_MODEL:
            value = "name its directory"
            raise _incomplete("this file is an adapter, not a model", path, value)
        tensors = tensors_in_file(directory, path.name, export, follow_links=True)
        return source_of_files(directory, [path.name], tensors, export, follow_links=True)


def _incomplete(what: str, path: Path, value: str) -> CheckpointUnusable:
    hint = "name a directory of *.safetensors, or a file with all tensors of the model"
    return CheckpointUnusable(what, where=str(path), value=value, hint=hint)
