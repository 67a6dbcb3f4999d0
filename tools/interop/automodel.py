"""NeMo AutoModel: what its Checkpointer saves is read here, and its runs continue here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.clients.environments import TORCH, Environment
from tools.interop.losses import losses_check, tensors_check
from tools.interop.program import Check, Program, Workplace

_TRAIN = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "automodel" / "train.py"
_NAME = "epoch_0_step_4"


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks. Exports to Hugging Face files, which AutoModel reads, are checked by ``make clients``."""
    made = workplace.directory / "made"
    workplace.run_script(_TRAIN, made, "--all")
    source = made / _NAME
    yield tensors_check(source, "its checkpoint", recorded=made)
    config = source / "model" / ".hf_metadata"
    for num_ranks in (1, 2):
        yield losses_check(
            workplace, source, "its run", num_ranks=num_ranks, recorded=made, config=config
        )


PROGRAM = Program(
    name="NeMo AutoModel",
    environment=Environment(
        "automodel",
        [TORCH],
        ["nemo-automodel==0.7.0"],
        ["transformers==5.18.0", "datasets>=4", "pyyaml", "torchdata", "tiktoken"],
    ),
    packages=("nemo-automodel", "torch"),
    checks=checks,
)
