"""transformers' Trainer: its runs continue here, and runs of this program continue there, with the same losses."""

import json
from collections.abc import Iterator

from tests.support.runs.continued import ADAPTER, CONTINUED, losses_of
from tools.interop.program import Check, Workplace, losses_check, recorded_losses

_MAKER = "trainer/make.py"
_LINEAR = {
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
}
# The Trainer's settings, and the recipe that corresponds to them.
_VARIANTS = {
    "cosine with warm-up, 4 micro-batches, 22 samples": (["--num-samples", "22"], CONTINUED),
    "linear, 1 micro-batch, untied head": (
        ["--untied", "--num-samples", "24", "--settings", json.dumps(_LINEAR)],
        CONTINUED.replace("name: cosine\n  warmup_steps: 2", "name: linear")
        .replace("num_samples: 22", "num_samples: 24")
        .replace("local_batch_size: 2", "local_batch_size: 4"),
    ),
}
_RANKS = ((1, "ddp"), (2, "ddp"), (2, "fsdp2"))


def checks(workplace: Workplace) -> Iterator[Check]:
    for number, (name, (arguments, recipe)) in enumerate(_VARIANTS.items()):
        made = workplace.made(_MAKER, *arguments, name=f"made{number}")
        text = recipe.replace("CONFIG", str(made / "checkpoint-5"))
        yield from _here(workplace, made.name, f"it ({name})", text)
        yield _back(workplace, f"there{number}", name, arguments, text)
    # An adapter of peft.
    base = workplace.made(_MAKER, "--adapter", name="adapter") / "base"
    text = CONTINUED.replace("from_config: CONFIG", f"from_pretrained: {base}") + ADAPTER
    yield from _here(workplace, "adapter", "its adapter of peft", text, "--base", str(base))


def _here(
    workplace: Workplace, made: str, what: str, recipe: str, *options: str
) -> Iterator[Check]:
    source = workplace.directory / made
    for num_ranks, strategy in _RANKS:
        run = workplace.directory / f"here-{made}-{num_ranks}-{strategy}" / "run"
        workplace.ckpt("import", source / "checkpoint-5", run, "--training-state", *options)
        override = f"--distributed.strategy={strategy}"
        text = recipe.replace("RUN", str(run))
        workplace.train(text, run.parent, override, num_ranks=num_ranks)
        what_here = f"{what} continues here, {strategy} on {num_ranks} rank(s)"
        yield losses_check(what_here, losses_of(run), recorded_losses(source))


def _back(workplace: Workplace, place: str, name: str, arguments: list[str], recipe: str) -> Check:
    """Train 10 steps here, and let the Trainer continue from the export of step 5."""
    directory = workplace.directory / place
    run, exported = directory / "run", directory / "exported"
    text = recipe.replace("RUN", str(run)).replace("ckpt_every_epochs: null", "ckpt_every_steps: 5")
    workplace.train(text, directory, num_ranks=1)
    (checkpoint,) = run.glob("epoch_*_step_5")
    workplace.ckpt("export", checkpoint, "--to", "trainer", "-o", exported)
    # With a callback that has state, which the Trainer looks up in the checkpoint when it saves.
    resume = ("--resume", exported, "--early-stopping")
    (directory / "made").mkdir()
    made = workplace.made(_MAKER, *arguments, *resume, name=f"{place}/made")
    what = f"it resumes from an export with early stopping, steps 6 to 10 ({name})"
    return losses_check(what, recorded_losses(made, first=6), losses_of(run))
