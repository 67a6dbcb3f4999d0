"""Descriptions of stored tensors: those of one module, and a complete model. No tensor is read here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.export.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.errors import CheckpointUnusable


@dataclass(frozen=True, slots=True)
class Tensors:
    """The stored tensors of one module: slices in files relative to *root*, and {tied name: stored name}."""

    root: Path
    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """The description of a stored model: slices in files relative to *root*, and the notes that its directory gives.

    *tied* maps tied names to stored names. *notes* are sentences for the user. *omitted* names, in words, what the
    files contain beside the model, such as optimizer state.

    *manifest* is that of a checkpoint of this program, restricted to the files that an export reads. A *finished*
    source consists of Hugging Face files: its tensors are whole and have the names of these files. *files* lists them,
    unless the manifest does. *side_files* is a directory of another program, which contains the model's config and
    tokenizer among other files. If they are an export, *export* is its manifest, and the slices have its digests.
    *averaged* is the model whose weights these are averages of: it has the metadata, and exports have its dtypes.
    *stated_config* is what the files themselves state of the model's config, under the keys of config.json.
    *misplaced* are tensors that are not in the file that an index names.
    """

    root: Path
    model_directory: Path
    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()
    finished: bool = False
    export: ExportManifest | None = None
    files: frozenset[str] = frozenset()
    side_files: Path | None = None
    omitted: tuple[str, ...] = ()
    averaged: Source | None = None
    stated_config: Mapping[str, Any] = field(default_factory=dict)
    misplaced: tuple[str, ...] = ()

    @property
    def has_digests(self) -> bool:
        """Whether the files can be compared with digests."""
        return self.manifest is not None or self.export is not None

    @property
    def metadata_directory(self) -> Path | None:
        """The directory of config.json and the tokenizer's files: ``.hf_metadata``, if the source has one.

        A finished source has them beside the weights.
        """
        if self.averaged is not None:
            return self.averaged.metadata_directory
        if self.finished:
            return self.model_directory
        path = self.model_directory / layout.HF_METADATA
        # A link could lead out of the checkpoint.
        if path.is_symlink() or not path.is_dir():
            return None
        return path

    @property
    def config_directory(self) -> Path:
        """The directory where the model's config.json is, if it exists: with metadata, side files, or the weights."""
        return self.metadata_directory or self.side_files or self.model_directory


def check_no_links(root: Path, paths: Iterable[str]) -> None:
    """Raise :class:`CheckpointUnusable` if one of *paths*, relative to *root*, is a symbolic link."""
    for path in paths:
        if (root / path).is_symlink():
            target = os.readlink(root / path)
            raise unusable("a checkpoint contains a symbolic link", root / path, target)


def unusable(
    what: str,
    where: Path | str,
    value: object,
    hint: str = "take the files from another copy, or use another checkpoint",
) -> CheckpointUnusable:
    """Return an error for a damaged file or directory *where*, with the *value* that shows the damage."""
    return CheckpointUnusable(what, where=str(where), value=value, hint=hint)
