"""Checks of runs that another program started: imported with the training state, they continue with the same losses."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from automodel_ckpt.convert.formats.format import Parameters
from automodel_ckpt.convert.formats.registry import detect_run
from tests.support.external_tensors import moments, no_parameters, values
from tests.support.runs.continued import SHARDED, continued_losses
from tools.interop.program import Check, Workplace

_TOLERANCE = 1e-5
_SAVED_STEP = 5


def losses_check(
    workplace: Workplace,
    source: Path,
    what: str,
    *,
    num_ranks: int,
    clip: str = "null",
    recorded: Path | None = None,
    config: Path | None = None,
) -> Check:
    """Import *source*, train steps 6 to 10, and compare the losses with ``losses.json`` in *recorded*.

    *clip* is the recipe's ``clip_grad_norm``, and *config* the directory of config.json. Both directories are by
    default *source*.
    """
    strategy = "fsdp2" if num_ranks > 1 else "ddp"
    options = (*SHARDED, f"--clip_grad_norm={clip}", f"--distributed.strategy={strategy}")
    directory = workplace.directory / f"continued-{source.name}-{num_ranks}"
    directory.mkdir()
    with open(workplace.log, "a") as log, contextlib.redirect_stdout(log):
        found = continued_losses(source, directory, *options, num_ranks=num_ranks, config=config)
    expected: list[float] = json.loads(((recorded or source) / "losses.json").read_text())
    steps = list(range(_SAVED_STEP + 1, len(expected) + 1))
    largest = 0.0
    for step, loss in found.items():
        difference = abs(loss - expected[step - 1]) / abs(expected[step - 1])
        largest = max(largest, difference)
    is_equal = list(found) == steps and largest <= _TOLERANCE
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    text = f"losses of steps {steps[0]} to {steps[-1]} differ by at most {largest:.1e}"
    return Check(f"{what} continues here on {ranks}", text, is_equal)


def tensors_check(
    source: Path,
    what: str,
    parameters: Parameters = no_parameters,
    *,
    recorded: Path | None = None,
) -> Check:
    """Compare weights and moments with ``expected.safetensors`` in *recorded*, by default *source*.

    It has {NAME: weight, NAME:ENTRY: moment}.
    """
    known = detect_run(source)
    state = known.training_state(source, parameters) if known is not None else None
    if state is None or state.optimizer is None:
        return Check(f"weights and moments of {what}", "no optimizer", False)
    found = {**values(source), **moments(state.optimizer)}
    expected = load_file((recorded or source) / "expected.safetensors")
    different: list[str] = []
    for name, tensor in expected.items():
        if name not in found or not torch.equal(found[name].to(tensor.dtype), tensor):
            different.append(name)
    text = f"{len(expected) - len(different)} of {len(expected)} tensors bit-equal"
    return Check(f"weights and moments of {what}", text, not different)
