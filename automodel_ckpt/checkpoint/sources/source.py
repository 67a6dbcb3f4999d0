"""Descriptions of stored tensors: of one module, and of the model that an export reads. No tensor is read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from automodel_ckpt.checkpoint import layout
from automodel_ckpt.checkpoint.export_manifest import ExportManifest
from automodel_ckpt.checkpoint.manifest import Manifest
from automodel_ckpt.checkpoint.slices import Tensor
from automodel_ckpt.errors import CheckpointUnusable


@dataclass(frozen=True, slots=True)
class Tensors:
    """The stored tensors of one module: slices in files relative to *root*, and {tied name: stored name}."""

    root: Path
    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """Slices to export: their files are relative to *root*.

    *manifest*, where there is one, names no other files than those that the export reads. A *finished* source is a
    model directory of Hugging Face files already: its tensors are whole, under the names that they have there. Of one
    that is an export, *export* is its manifest, and the slices have its digests.
    """

    root: Path
    model_directory: Path
    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()
    finished: bool = False
    export: ExportManifest | None = None

    @property
    def has_digests(self) -> bool:
        """Whether there are digests that the files can be compared with."""
        return self.manifest is not None or self.export is not None

    @property
    def metadata_directory(self) -> Path | None:
        """``.hf_metadata``, where the source has one; of a finished one the model's directory."""
        if self.finished:
            return self.model_directory
        path = self.model_directory / layout.HF_METADATA
        return path if path.is_dir() and not path.is_symlink() else None


def unusable(what: str, where: Path, value: object) -> CheckpointUnusable:
    """What is wrong with the file or directory *where*, and the *value* that shows it."""
    return CheckpointUnusable(
        what,
        where=str(where),
        value=value,
        hint="take the files from another copy, or use another checkpoint",
    )
