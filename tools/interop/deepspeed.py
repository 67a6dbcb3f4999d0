"""DeepSpeed: checkpoints of ZeRO 1, 2 and 3 and universal ones are read here, and their runs continue here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from automodel_ckpt.convert.formats.registry import detect
from tests.support.external_tensors import moments, no_parameters, values
from tools.clients.environments import TORCH, Environment
from tools.interop.losses import losses_check
from tools.interop.program import Check, Program, Workplace

_FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "deepspeed"
_STAGES = ("stage1", "stage2", "stage3")
_CLIP = "1.0"


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks. The first run compiles DeepSpeed's helper for the CPU, which takes a minute."""
    # DeepSpeed starts ninja by its name.
    workplace.variables["PATH"] = f"{workplace.python.parent}:{os.environ['PATH']}"
    made = workplace.directory / "made"
    workplace.run_script(_FIXTURES / "make.py", made)
    for directory in sorted(made.iterdir()):
        yield _compared(directory)
    runs = workplace.directory / "runs"
    workplace.run_script(_FIXTURES / "train.py", runs, *_STAGES)
    for name in _STAGES:
        for num_ranks in (1, 2):
            yield losses_check(
                workplace, runs / name, f"ZeRO {name}", num_ranks=num_ranks, clip=_CLIP
            )
    universal = _universal(workplace, runs / "stage3")
    yield losses_check(workplace, universal, "a universal checkpoint", num_ranks=1, clip=_CLIP)


def _compared(directory: Path) -> Check:
    """Compare the weights with DeepSpeed's own conversion, and the moments with those that it gathers."""
    what = f"weights and moments of {directory.name}"
    known = detect(directory)
    state = known.training_state(directory, no_parameters) if known is not None else None
    if state is None or state.optimizer is None:
        return Check(what, "no optimizer", False)
    weights = values(directory)
    adam = moments(state.optimizer)
    expected = load_file(directory / "expected.safetensors")
    num_equal = 0
    for name, tensor in expected.items():
        num_equal += name in weights and torch.equal(weights[name].to(tensor.dtype), tensor)
    gathered = load_file(directory / "moments.safetensors")
    num_moments = 0
    for name, tensor in gathered.items():
        num_moments += name in adam and torch.equal(adam[name], tensor)
    text = f"{num_equal} of {len(expected)} weights, {num_moments} of {len(gathered)} moments bit-equal"
    return Check(what, text, (num_equal, num_moments) == (len(expected), len(gathered)))


def _universal(workplace: Workplace, source: Path) -> Path:
    """Convert a checkpoint with DeepSpeed's own script; return the directory of the result."""
    target = workplace.directory / "runs" / "universal"
    target.mkdir()
    tag = (source / "latest").read_text()
    command: list[str | Path] = [
        workplace.python,
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        f"--input_folder={source / tag}",
        f"--output_folder={target / tag}_universal",
        "--inject_missing_state",
        "--num_extract_workers=1",
        "--num_merge_workers=1",
    ]
    workplace.run(command)
    for name in ("config.json", "losses.json"):
        shutil.copy(source / name, target)
    return target


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
