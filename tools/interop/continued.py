"""Checks of runs that another program started: imported with the training state, they continue with the same losses."""

import contextlib
from pathlib import Path

from safetensors.torch import load_file

from automodel_ckpt.convert.formats.registry import detect_run
from tests.support.external_tensors import moments, no_parameters, values
from tests.support.runs.continued import SHARDED, continued_losses
from tools.interop.program import (
    Check,
    Workplace,
    losses_check,
    recorded_losses,
    tensors_check,
)


def continued_check(
    workplace: Workplace,
    source: Path,
    what: str,
    *,
    num_ranks: int,
    recorded: Path | None = None,
    config: Path | None = None,
) -> Check:
    """Import *source*, train steps 6 to 10, and compare the losses with ``losses.json`` in *recorded*.

    *config* is the directory of config.json. Both directories are by default *source*.
    """
    strategy = "fsdp2" if num_ranks > 1 else "ddp"
    options = (*SHARDED, "--clip_grad_norm=null", f"--distributed.strategy={strategy}")
    directory = workplace.directory / f"continued-{source.name}-{num_ranks}"
    with open(workplace.log, "a") as log, contextlib.redirect_stdout(log):
        found = continued_losses(source, directory, *options, num_ranks=num_ranks, config=config)
    what = f"{what} continues here on {num_ranks} rank(s)"
    return losses_check(what, found, recorded_losses(recorded or source))


def state_check(source: Path, what: str, recorded: Path | None = None) -> Check:
    """Compare weights and moments with ``expected.safetensors`` in *recorded*, by default *source*.

    It has {NAME: weight, NAME:ENTRY: moment}.
    """
    what = f"weights and moments of {what}"
    known = detect_run(source)
    state = known.training_state(source, no_parameters) if known is not None else None
    if state is None or state.optimizer is None:
        return Check(what, "no optimizer", False)
    expected = load_file((recorded or source) / "expected.safetensors")
    found = {**values(source), **moments(state.optimizer)}
    return tensors_check(what, found, expected, any_dtype=True)
