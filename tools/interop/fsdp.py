"""torch with FSDP: what DCP saves is read and continued here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.interop.environments import TORCH, Environment
from tools.interop.losses import losses_check, tensors_check
from tools.interop.program import Check, Program, Workplace

_MAKER = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "fsdp" / "make.py"


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks of each layout of the optimizer."""
    made = workplace.directory / "made"
    workplace.run_script(_MAKER, made, "--all")
    for source in sorted(made.glob("torch-*")):
        yield tensors_check(source, source.name)
        for num_ranks in (1, 2):
            yield losses_check(workplace, source, source.name, num_ranks=num_ranks)


PROGRAM = Program(
    name="torch (FSDP)",
    environment=Environment(
        "fsdp",
        [TORCH],
        then=["accelerate==1.15.0", "transformers==5.23.0", "safetensors==0.8.0"],
    ),
    packages=("torch",),
    checks=checks,
)
