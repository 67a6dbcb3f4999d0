"""PEFT adapters: ``adapter_model.safetensors`` with a config. Versions before 0.6 (2023) wrote a pickle instead."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.checkpoint.export.export_manifest import find_export_manifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import names_in
from automodel_ckpt.convert.formats.format import Format
from automodel_ckpt.convert.formats.hugging_face import source_of_files, tensors_in_file
from automodel_ckpt.convert.formats.torch.torch_files import BIN_FILE, BIN_INDEX

OLD_ADAPTER = "adapter_model.bin"
_MODELS = frozenset({layout.HF_INDEX, "model.safetensors", BIN_FILE, BIN_INDEX})


class PeftAdapter(Format):
    """A directory with the file of an adapter. Its tensors have PEFT's names. Other weights in it are not read."""

    name = "PEFT adapter"

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        return has_adapter(path)

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        export = find_export_manifest(path, follow_links=follow_links)
        names = [layout.ADAPTER_MODEL]
        tensors = tensors_in_file(path, names[0], export, follow_links=follow_links)
        source = source_of_files(path, names, tensors, export, follow_links=follow_links)
        return replace(source, omitted=_other_weights(path))


def has_adapter(path: Path) -> bool:
    """Return whether the directory *path* has the weights of an adapter."""
    return os.path.lexists(path / layout.ADAPTER_MODEL)


def _other_weights(path: Path) -> tuple[str, ...]:
    """Describe the weights beside the adapter: torchtune saves the merged model in the same directory."""
    found = set(names_in(path)) & _MODELS
    if not found:
        return ()
    names = " and ".join(sorted(found))
    return (f"the model in {names}: to use it, move {layout.ADAPTER_MODEL} to another directory",)
