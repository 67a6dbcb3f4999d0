"""DeepSpeed: checkpoints of ZeRO 1, 2 and 3 and universal ones are read here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.external_tensors import values
from tools.interop.environments import TORCH, Environment
from tools.interop.program import Check, Program, Workplace

_FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "deepspeed"


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks. The first run compiles DeepSpeed's helper for the CPU, which takes a minute."""
    # DeepSpeed starts ninja by its name.
    workplace.variables["PATH"] = f"{workplace.python.parent}:{os.environ['PATH']}"
    made = workplace.directory / "made"
    workplace.run_script(_FIXTURES / "make.py", made)
    for directory in sorted(made.iterdir()):
        yield _compared(directory)


def _compared(directory: Path) -> Check:
    """Compare the weights with DeepSpeed's own conversion."""
    weights = values(directory)
    expected = load_file(directory / "expected.safetensors")
    num_equal = 0
    for name, tensor in expected.items():
        num_equal += name in weights and torch.equal(weights[name].to(tensor.dtype), tensor)
    text = f"{num_equal} of {len(expected)} weights bit-equal"
    return Check(f"weights of {directory.name}", text, num_equal == len(expected))


PROGRAM = Program(
    name="DeepSpeed",
    environment=Environment(
        "deepspeed",
        [TORCH],
        then=["deepspeed==0.19.8", "ninja", "safetensors==0.8.0", "transformers==5.23.0"],
    ),
    packages=("deepspeed", "torch"),
    checks=checks,
    variables={"DS_ACCELERATOR": "cpu"},
)
