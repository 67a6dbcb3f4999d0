"""A plain DCP directory as a source of exports: the model in a state dict that another program saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.sources.dcp_directory import DcpContent, read_content, read_tensors
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.errors import CheckpointUnusable
from automodel_ckpt.units import left_out, others_text, values_text

# Under which of these a nested state dict keeps the model's own.
_MODEL_KEYS = ("model", "module", "model_state_dict", "state_dict")


def open_dcp(directory: Path) -> Source:
    """The model in a directory of ``.metadata`` and ``.distcp`` files. Raises :class:`CheckpointUnusable`."""
    for name in (layout.DCP_METADATA, layout.HF_METADATA):
        if (directory / name).is_symlink():
            raise CheckpointUnusable(
                "a checkpoint contains a symbolic link",
                where=str(directory / name),
                value=os.readlink(directory / name),
                hint="put the file itself in its place",
            )
    content = read_content(directory)
    names = model_names(content)
    wanted = DcpContent({fqn: content.tensors[fqn] for fqn in names}, ())
    tensors = {names[t.fqn]: replace(t, fqn=names[t.fqn]) for t in read_tensors(directory, wanted)}
    if not tensors:
        raise CheckpointUnusable(
            "there are no tensors here",
            where=str(directory),
            value=f"{len(content.values)} other values",
            hint="name the directory that the model was saved to",
        )
    return Source(directory, directory, tensors, notes=tuple(_notes(content, names)))


def model_names(content: DcpContent) -> Mapping[str, str]:
    """Stored name to the name in the model's own state dict, of each tensor that belongs to the model.

    Where the state dict was nested and holds a mapping under ``model`` (or the like), that is the model; else all is.
    """
    paths = {fqn: path for fqn, path in content.paths.items() if fqn in content.tensors}
    for key in _MODEL_KEYS:
        found = {
            fqn: ".".join(map(str, path[1:]))
            for fqn, path in paths.items()
            if path[0] == key and len(path) > 1
        }
        if found and len(set(found.values())) == len(found):
            return found
    return {fqn: fqn for fqn in content.tensors}


def _notes(content: DcpContent, names: Mapping[str, str]) -> list[str]:
    notes = ["the .distcp files are unchecked: there is no manifest with their digests"]
    if others := len(content.tensors) - len(names):
        notes.append(left_out(others_text(others), others))
    if content.values:
        notes.append(left_out(values_text(len(content.values)), len(content.values)))
    return notes
