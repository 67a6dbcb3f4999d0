"""NVIDIA's exporter (modelopt): its TensorRT-LLM checkpoints are read here, and the same tensors are written."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors.torch import load_file

from tools.interop.program import Check, Workplace, files_check, tensors_check


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks of both directions, for each model and number of ranks."""
    for theirs in sorted(workplace.made("modelopt/make.py").glob("*/tp*")):
        source, size = theirs.parent / "hf", theirs.name.removeprefix("tp")
        what = f"{theirs.parent.name} Llama, tensor parallel size {size}"
        yield files_check(f"{what}: its checkpoint is read", theirs, source, tied_twice=True)
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
