"""NVIDIA's exporter (modelopt): its TensorRT-LLM checkpoints of one rank are read, and the same tensors are written.

Checkpoints of several ranks are written, and refused when they are read.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from automodel_ckpt.convert.open import open_source
from automodel_ckpt.errors import CheckpointUnusable
from tools.interop.program import Check, Workplace, files_check, tensors_check


def checks(workplace: Workplace) -> Iterator[Check]:
    for theirs in sorted(workplace.made("modelopt/make.py").glob("*/tp*")):
        source, size = theirs.parent / "hf", theirs.name.removeprefix("tp")
        what = f"{theirs.parent.name} Llama, tensor parallel size {size}"
        if size == "1":
            yield files_check(f"{what}: its checkpoint is read", theirs, source, tied_twice=True)
        else:
            yield _refusal(f"{what}: its checkpoint is refused", theirs)
        ours = workplace.directory / f"{theirs.parent.name}-{size}"
        options = ["--compress", "false", "--tensor-parallel", size]
        workplace.ckpt("export", source, "--to", "qnemo", "-o", ours, *options)
        written: dict[str, torch.Tensor] = {}
        wanted: dict[str, torch.Tensor] = {}
        for path in theirs.glob("rank*.safetensors"):
            for found, file in ((wanted, path), (written, ours / path.name)):
                found |= {f"{path.name} {name}": value for name, value in load_file(file).items()}
        check = tensors_check(f"{what}: the same tensors are written", written, wanted)
        yield Check(check.what, check.found, check.good and written.keys() == wanted.keys())


def _refusal(what: str, checkpoint: Path) -> Check:
    try:
        open_source(checkpoint)
    except CheckpointUnusable as error:
        found = str(error).splitlines()[0]
        return Check(what, found, "ranks" in found)
    return Check(what, "it was opened", False)
