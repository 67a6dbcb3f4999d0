"""NVIDIA's exporter (modelopt): its TensorRT-LLM checkpoints are read here, and the same tensors are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from automodel_ckpt.checkpoint.tensors.difference import StoredTensors, compare
from automodel_ckpt.convert.open import open_source
from tools.interop.environments import TORCH, Environment
from tools.interop.program import Check, Program, Workplace

_ROOT = Path(__file__).resolve().parents[2]
_MAKER = _ROOT / "tests" / "fixtures" / "modelopt" / "make.py"


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks of both directions, for each model and number of ranks."""
    made = workplace.directory / "made"
    workplace.run_script(_MAKER, made)
    for theirs in sorted(made.glob("*/tp*")):
        source = theirs.parent / "hf"
        size = theirs.name.removeprefix("tp")
        what = f"{theirs.parent.name} Llama, tensor parallel size {size}"
        yield Check(f"{what}: its checkpoint is read", *_merged(theirs, source))
        ours = workplace.directory / f"{theirs.parent.name}-{size}"
        options = ["--compress", "false", "--tensor-parallel", size]
        workplace.ckpt("export", source, "--to", "qnemo", "-o", ours, *options)
        yield Check(f"{what}: the same tensors are written", *_equal(ours, theirs))


def _merged(theirs: Path, source: Path) -> tuple[str, bool]:
    """Compare the merged ranks with the Hugging Face files that the exporter was given."""
    found, wanted = open_source(theirs), open_source(source)
    tensors = dict(found.tensors)
    if "lm_head.weight" not in wanted.tensors:
        # Tied embeddings are written twice.
        del tensors["lm_head.weight"]
    difference = compare(
        StoredTensors(found.root, tensors), StoredTensors(wanted.root, wanted.tensors)
    )
    good = difference.num_equal == len(tensors) == len(wanted.tensors)
    return f"{difference.num_equal} of {len(wanted.tensors)} tensors bit-equal", good


def _equal(ours: Path, theirs: Path) -> tuple[str, bool]:
    num_tensors = num_equal = 0
    for path in sorted(theirs.glob("rank*.safetensors")):
        wanted, found = load_file(path), load_file(ours / path.name)
        num_tensors += len(wanted.keys() | found.keys())
        for name, value in wanted.items():
            other = found.get(name)
            is_equal = other is not None and other.dtype == value.dtype
            num_equal += is_equal and other is not None and torch.equal(other, value)
    return f"{num_equal} of {num_tensors} tensors bit-equal", num_equal == num_tensors > 0


PROGRAM = Program(
    name="NVIDIA ModelOpt",
    environment=Environment(
        "modelopt",
        first=(TORCH,),
        then=(TORCH, "nvidia-modelopt==0.47.0", "transformers>=5.17,<6", "requests"),
    ),
    packages=("nvidia-modelopt", "transformers"),
    checks=checks,
)
