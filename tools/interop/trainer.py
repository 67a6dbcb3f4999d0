"""transformers' Trainer: its runs continue here, and runs of this program continue there, with the same losses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.runs.continued import ADAPTER, CONTINUED, losses_of
from tools.interop.environments import TORCH, Environment
from tools.interop.program import Check, Program, Workplace

_ROOT = Path(__file__).resolve().parents[2]
_MAKER = _ROOT / "tests" / "fixtures" / "trainer" / "make.py"
_TOLERANCE = 1e-5
# The Trainer's settings, and the recipe that corresponds to them.
_VARIANTS = {
    "cosine with warm-up, 4 micro-batches, 22 samples": (["--num-samples", "22"], CONTINUED),
    "linear, 1 micro-batch, untied head": (
        [
            "--untied",
            "--num-samples",
            "24",
            "--settings",
            json.dumps(
                {
                    "lr_scheduler_type": "linear",
                    "warmup_steps": 0,
                    "per_device_train_batch_size": 8,
                    "gradient_accumulation_steps": 1,
                }
            ),
        ],
        CONTINUED.replace("name: cosine\n  warmup_steps: 2", "name: linear")
        .replace("num_samples: 22", "num_samples: 24")
        .replace("local_batch_size: 2", "local_batch_size: 4"),
    ),
}
_RANKS = ((1, "ddp"), (2, "ddp"), (2, "fsdp2"))


def checks(workplace: Workplace) -> Iterator[Check]:
    """Yield the checks of both directions."""
    for number, (name, (arguments, recipe)) in enumerate(_VARIANTS.items()):
        made = workplace.directory / f"made{number}"
        workplace.run_script(_MAKER, made, *arguments)
        source = made / "checkpoint-5"
        expected = _losses(made)
        for num_ranks, strategy in _RANKS:
            directory = workplace.directory / f"here{number}-{num_ranks}-{strategy}"
            text = recipe.replace("CONFIG", str(source)).replace("RUN", str(directory / "run"))
            workplace.ckpt("import", source, directory / "run", "--training-state")
            _train(
                workplace,
                directory,
                text,
                f"--distributed.strategy={strategy}",
                num_ranks=num_ranks,
            )
            found = losses_of(directory / "run")
            what = f"steps 6 to 10 continue here, {strategy} on {num_ranks} rank(s) ({name})"
            yield _compared(what, found, {step: expected[step] for step in range(6, 11)})
        yield _back(workplace, number, name, arguments, recipe.replace("CONFIG", str(source)))
    yield from _adapter_checks(workplace)


def _adapter_checks(workplace: Workplace) -> Iterator[Check]:
    """Train an adapter with peft in the Trainer, and continue it here."""
    made = workplace.directory / "adapter"
    workplace.run_script(_MAKER, made, "--adapter")
    source, base = made / "checkpoint-5", made / "base"
    expected = _losses(made)
    recipe = CONTINUED.replace("from_config: CONFIG", f"from_pretrained: {base}") + ADAPTER
    for num_ranks, strategy in _RANKS:
        directory = workplace.directory / f"adapter-{num_ranks}-{strategy}"
        workplace.ckpt("import", source, directory / "run", "--training-state", "--base", base)
        text = recipe.replace("RUN", str(directory / "run"))
        _train(
            workplace, directory, text, f"--distributed.strategy={strategy}", num_ranks=num_ranks
        )
        found = losses_of(directory / "run")
        what = f"its adapter of peft continues here, {strategy} on {num_ranks} rank(s)"
        yield _compared(what, found, {step: expected[step] for step in range(6, 11)})


def _back(workplace: Workplace, number: int, name: str, arguments: list[str], recipe: str) -> Check:
    """Train 10 steps here, and let the Trainer continue from the export of step 5."""
    directory = workplace.directory / f"there{number}"
    run = directory / "run"
    text = recipe.replace("RUN", str(run)).replace("ckpt_every_epochs: null", "ckpt_every_steps: 5")
    directory.mkdir()
    _train(workplace, directory, text, num_ranks=1)
    (checkpoint,) = run.glob("epoch_*_step_5")
    exported = directory / "exported"
    workplace.ckpt("export", checkpoint, "--to", "trainer", "-o", exported)
    made = directory / "made"
    made.mkdir()
    # With a callback that has state, which the Trainer looks up in the checkpoint when it saves.
    workplace.run_script(_MAKER, made, *arguments, "--resume", exported, "--early-stopping")
    found = dict(enumerate(json.loads((made / "losses.json").read_text()), start=6))
    expected = losses_of(run)
    what = f"it resumes from an export with early stopping, steps 6 to 10 ({name})"
    return _compared(what, found, {step: expected[step] for step in range(6, 11)})


def _compared(what: str, found: dict[int, float], expected: dict[int, float]) -> Check:
    if found.keys() != expected.keys():
        return Check(what, f"losses of steps {list(found)}", False)
    largest = max(abs(found[step] / expected[step] - 1) for step in expected)
    return Check(what, f"losses differ by at most {largest:.1e}", largest <= _TOLERANCE)


def _losses(made: Path) -> dict[int, float]:
    return dict(enumerate(json.loads((made / "losses.json").read_text()), start=1))


def _train(
    workplace: Workplace, directory: Path, recipe: str, *overrides: str, num_ranks: int
) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / "recipe.yaml"
    path.write_text(recipe)
    command = [
        sys.executable,
        "-m",
        "automodel_ckpt.cli.train",
        str(path),
        "--trust=tests",
        f"--nproc-per-node={num_ranks}",
        *overrides,
    ]
    with open(workplace.log, "a") as output:
        subprocess.run(command, check=True, cwd=_ROOT, stdout=output, stderr=output)


PROGRAM = Program(
    "transformers Trainer",
    Environment("trainer", first=(TORCH,), then=("transformers==5.23.0", "accelerate", "peft")),
    ("transformers", "accelerate", "peft"),
    checks,
)
