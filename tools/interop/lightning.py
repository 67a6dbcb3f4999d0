"""Runs move between PyTorch Lightning and this program, in both directions, with the same losses.

Lightning's Trainer also saves and resumes with our checkpoints (automodel_ckpt/integrations/lightning.py).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.json_rows import recipe
from tests.support.runs.continued import losses_of
from tools.interop.program import Check, Workplace, losses_check, recorded_losses
from tools.support import ROOT, environment

_PROGRAM = re.compile(r"^```python file=lightning_run.py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def checks(workplace: Workplace) -> Iterator[Check]:
    # The maker trains 10 steps without interruption, and saves after step 5.
    made = workplace.made("lightning/make.py")
    constant = ("--clip_grad_norm=null", "--optimizer.weight_decay=0.01")
    for kind, name in {"single": "epoch=0-step=5.ckpt", "distributed": "distributed"}.items():
        for num_ranks in (1, 2):
            run = workplace.directory / f"{kind}-{num_ranks}"
            workplace.ckpt("import", made / name, run, "--training-state", "--config", made)
            _train(workplace, made, run, *constant, num_ranks=num_ranks)
            what = f"a run of Lightning ({name}) continues here on {num_ranks} rank(s)"
            yield losses_check(what, losses_of(run), recorded_losses(made, kind))
    # Lightning continues a run of this program, from the end of an epoch and from within one.
    run = workplace.directory / "ours"
    _train(workplace, made, run, "--optimizer.weight_decay=0.1", num_ranks=2)
    for epoch, step in ((0, 5), (1, 7)):
        target, source = workplace.directory / f"{step}.ckpt", run / f"epoch_{epoch}_step_{step}"
        workplace.ckpt("export", source, "--to", "lightning", "-o", target)
        report = workplace.report("resume_lightning.py", target, made, str(step - 5))
        found = {int(key): value for key, value in report["losses"].items()}
        what = f"Lightning continues a run of ours from step {step}"
        yield losses_check(what, found, losses_of(run), first=step + 1)
    yield from _callback_checks(workplace)


def _callback_checks(workplace: Workplace) -> Iterator[Check]:
    """Run the guide's program without an interruption, and killed in steps within and at the start of an epoch."""
    found = _PROGRAM.search((ROOT / "docs" / "guides" / "library.md").read_text())
    assert found is not None
    script = workplace.directory / "lightning_run.py"
    script.write_text(found[1])
    expected = _printed_losses(workplace, script, "whole")
    # It saves every 5 steps; an epoch has 10.
    for die_after, first in ((18, 16), (12, 11)):
        directory = f"killed_after_{die_after}"
        _printed_losses(workplace, script, directory, str(die_after))
        losses = _printed_losses(workplace, script, directory)
        what = f"our callback resumes a run of Lightning at step {first} after kill -9"
        is_equal = losses == {step: loss for step, loss in expected.items() if step >= first}
        text = "all losses are equal" if is_equal else f"losses of steps {list(losses)} differ"
        yield Check(what, text, is_equal)


def _printed_losses(workplace: Workplace, script: Path, *arguments: str) -> dict[int, float]:
    """Run the guide's program with Lightning's interpreter; return the losses that it prints, by step."""
    done = subprocess.run(
        [workplace.python, script, *arguments],
        check=False,  # a killed run has an exit code
        cwd=workplace.directory,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=600,
    )
    with open(workplace.log, "a") as log:
        log.write(done.stdout + done.stderr)
    lines = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in lines}


def _train(workplace: Workplace, made: Path, run: Path, *overrides: str, num_ranks: int) -> None:
    place = run.with_name(f"{run.name}-recipe")
    workplace.train(recipe(made, run), place, *overrides, num_ranks=num_ranks)
