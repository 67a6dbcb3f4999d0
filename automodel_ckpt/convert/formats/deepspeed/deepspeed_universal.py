"""Universal checkpoints of DeepSpeed: a directory ``zero/`` with a directory of files for each parameter.

The script ``ds_to_universal`` writes them (source: deepspeed/checkpoint/ds_to_universal.py, 0.19): ``fp32.pt``, and one
file for each entry of the optimizer's state, which are not read. Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.parts.slices import Tensor
from automodel_ckpt.checkpoint.sources.source import unusable
from automodel_ckpt.convert.formats.deepspeed.deepspeed_files import Shape, StateFile
from automodel_ckpt.convert.formats.files import names_in
from automodel_ckpt.convert.formats.torch.flat_vector import FlatVector
from automodel_ckpt.convert.formats.torch.torch_objects import StoredView

ZERO_DIRECTORY = "zero"
FP32 = "fp32"
_SUFFIX = ".pt"


class UniversalDirectory:
    """The directory ``zero/`` of the save in the directory *tag*."""

    def __init__(self, tag: Path) -> None:
        self.path = tag / ZERO_DIRECTORY
        if self.path.is_symlink() or not self.path.is_dir():
            what = "this is not a directory of parameters"
            raise unusable(what, self.path, "a link or a file")
        self._names = frozenset(names_in(self.path))

    def tensor(self, fqn: str, shape: Shape, entry: str) -> Tensor:
        """Return the weights of a parameter: a tensor of its shape, or (converted from ZeRO stage 3) a flat one.

        Its slices are in files relative to the directory of the tag.
        """
        file, view = self._file(fqn, entry)
        path = f"{ZERO_DIRECTORY}/{fqn}/{entry}{_SUFFIX}"
        if view.shape == shape:
            return file.tensor(fqn, view, path)
        segment = file.segment(f"the parameter {fqn!r}", view)
        if segment.num_elements != math.prod(shape):
            what = f"the parameter {fqn!r} does not have its shape"
            raise unusable(what, file.path, f"{segment.num_elements} elements, not {list(shape)}")
        vector = FlatVector([replace(segment, file=path)])
        elements = range(segment.num_elements)
        return Tensor(fqn, segment.dtype, shape, tuple(vector.slices(fqn, shape, elements, 0)))

    def _file(self, fqn: str, entry: str) -> tuple[StateFile, StoredView]:
        file = StateFile(self._directory(fqn), f"{entry}{_SUFFIX}")
        value = file.value
        view: Any = value.get("param") if isinstance(value, dict) else value
        if not isinstance(view, StoredView):
            raise unusable("this file has no tensor", file.path, type(view).__name__)
        return file, view

    def _directory(self, fqn: str) -> Path:
        # Compared with the listing: a name with a slash or ".." is never in it.
        if fqn not in self._names or (self.path / fqn).is_symlink():
            what = f"the file of the parameter {fqn!r} is missing"
            raise unusable(what, self.path, "no such name")
        return self.path / fqn
