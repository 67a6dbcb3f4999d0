"""Runs move between PyTorch Lightning and this program, in both directions, with the same losses.

Lightning's Trainer also saves and resumes with our checkpoints (automodel_ckpt/integrations/lightning.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.runs.continued import losses_of
from tools.interop.environments import TORCH, Environment
from tools.interop.program import Check, Program, Workplace

_ROOT = Path(__file__).resolve().parents[2]
_MAKE = _ROOT / "tests" / "fixtures" / "lightning" / "make.py"
_RESUME = Path(__file__).with_name("scripts") / "resume_lightning.py"
_GUIDE = _ROOT / "docs" / "guides" / "library.md"
_MAX_DIFFERENCE = 1e-5
_NUM_STEPS = 10


def _checks(workplace: Workplace) -> Iterator[Check]:
    made = workplace.directory / "made"
    made.mkdir()
    # The maker trains 10 steps without interruption, and saves after step 5.
    workplace.run_script(_MAKE, made)
    losses = json.loads((made / "losses.json").read_text())
    sources = {"single": "epoch=0-step=5.ckpt", "distributed": "distributed"}
    for kind, name in sources.items():
        expected = dict(enumerate(losses[kind], start=1))
        for num_ranks in (1, 2):
            run = workplace.directory / f"{kind}-{num_ranks}"
            workplace.ckpt("import", made / name, run, "--training-state", "--config", made)
            _train(made, run, num_ranks, "--clip_grad_norm=null", "--optimizer.weight_decay=0.01")
            what = f"a run of Lightning ({name}) continues here on {num_ranks} rank(s)"
            yield _compared(what, losses_of(run), expected, first=6)
    yield from _resumed(workplace, made)
    yield from _callback_checks(workplace)


def _resumed(workplace: Workplace, made: Path) -> Iterator[Check]:
    """Lightning continues a run of this program, from the end of an epoch and from within one."""
    run = workplace.directory / "ours"
    _train(made, run, 2, "--optimizer.weight_decay=0.1")
    expected = losses_of(run)
    for epoch, step in ((0, 5), (1, 7)):
        target = workplace.directory / f"step_{step}.ckpt"
        workplace.ckpt(
            "export", run / f"epoch_{epoch}_step_{step}", "--to", "lightning", "-o", target
        )
        report = workplace.directory / f"step_{step}.json"
        workplace.run_script(_RESUME, target, made, str(step - 5), report)
        found = {int(key): value for key, value in json.loads(report.read_text())["losses"].items()}
        what = f"Lightning continues a run of ours from step {step}"
        yield _compared(what, found, expected, first=step + 1)


def _callback_checks(workplace: Workplace) -> Iterator[Check]:
    """Run the guide's program without an interruption, and killed in steps within and at the start of an epoch."""
    found = re.search(
        r"^```python file=lightning_run.py\n(.*?)^```$",
        _GUIDE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
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
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [workplace.python, script, *arguments],
        check=False,  # a killed run has an exit code
        cwd=workplace.directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    with open(workplace.log, "a") as log:
        log.write(done.stdout + done.stderr)
    lines = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in lines}


def _compared(
    what: str, found: Mapping[int, float], expected: Mapping[int, float], first: int
) -> Check:
    steps = list(range(first, _NUM_STEPS + 1))
    if list(found) != steps:
        return Check(what, f"steps {list(found)} instead of {steps}", False)
    differences = [abs(found[step] - expected[step]) / expected[step] for step in steps]
    difference = max(differences)
    text = f"losses of steps {first} to {_NUM_STEPS} differ by {difference:.1e}"
    return Check(what, text, difference <= _MAX_DIFFERENCE)


def _train(made: Path, run: Path, num_ranks: int, *overrides: str) -> None:
    from tests.support.json_rows import recipe

    path = run.with_name(f"{run.name}.yaml")
    path.write_text(recipe(made, run))
    command = [
        sys.executable,
        "-m",
        "automodel_ckpt.cli.train",
        "--nproc-per-node",
        str(num_ranks),
        "--trust",
        "tests",
        str(path),
        *overrides,
    ]
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        command, check=True, cwd=_ROOT, env=environment, stdout=subprocess.DEVNULL, timeout=600
    )


PROGRAM = Program(
    name="PyTorch Lightning",
    environment=Environment(
        "lightning",
        first=(TORCH, "numpy", "safetensors", "transformers>=5.17,<6"),
        then=("lightning>=2.6,<2.7", "pyyaml", "xxhash"),
    ),
    packages=("lightning", "torch"),
    checks=_checks,
)
