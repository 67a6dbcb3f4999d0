"""Runs move between PyTorch Lightning and this program, in both directions, with the same losses.

``tools.trainers`` kills runs of Lightning's Trainer that save our checkpoints.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.support.json_rows import recipe
from tests.support.runs.continued import losses_of
from tools.interop.program import Check, Workplace, losses_check, recorded_losses


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


def _train(workplace: Workplace, made: Path, run: Path, *overrides: str, num_ranks: int) -> None:
    place = run.with_name(f"{run.name}-recipe")
    workplace.train(recipe(made, run), place, *overrides, num_ranks=num_ranks)
