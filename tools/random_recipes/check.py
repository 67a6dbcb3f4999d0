"""Train a recipe, resume it in two ways, verify and export it; and report what differs from the first run."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.crash.results import differences
from tools.random_recipes.draw import STEPS, Recipe, store_of
from tools.support import MEASURED, environment, program, step_lines

TIMEOUT_SECONDS = 1800
"""A start that takes longer is reported as one that hangs, also on a machine with other work."""
STOPPED = 75
REJECTED = 2
UNUSABLE = 3
_SAME_DATA = ("label_tokens", "sample_ids")
"""Fields of a step that do not depend on the number of ranks."""
_BY_RANK = ['dropout": 0.1', 'dropout_rate": 0.1', "dropout: 0.1", "neftune", '"micro_batch"']
_BY_RANK += ["gpt2", "bert"]
"""What gives each rank random numbers or negatives of its own. The configurations of GPT-2 and BERT have dropout."""
_SHOWN_CHARACTERS = 1500


@dataclass(frozen=True)
class Ended:
    """A process that has ended, or was killed because it did not; *output* has stdout and stderr."""

    code: int | None
    output: str

    @property
    def failed(self) -> bool:
        return self.code != 0 or "Traceback" in self.output

    @property
    def problem(self) -> str:
        code = "did not end" if self.code is None else f"exit code {self.code}"
        return f"{code}: {self.output[-_SHOWN_CHARACTERS:]}"


@dataclass(frozen=True)
class Result:
    """*outcome* is "trained", "rejected" or "failed"; *problems* is empty if all is as it should be."""

    outcome: str
    problems: list[str]
    reason: str = ""
    """Why the recipe was rejected."""


def check(recipe: Recipe, work: Path) -> Result:
    """Train the recipe, and compare further runs with the first one. *work* is a directory for their files.

    A recipe can be rejected, with exit code 2, because its options do not fit its model. Otherwise:

    * a copy that resumes from an earlier checkpoint has the same logs and the same final checkpoint, bit for bit;
    * or a run that is stopped by a signal, or killed, at a random time, and resumed; if it has a store, perhaps without
      its local directory;
    * a copy that resumes on another number of ranks trains on the same data, and its losses are nearly the same;
    * ``ckpt verify`` and ``ckpt export`` succeed, ``ckpt verify --deep`` also on the store.
    """
    numbers = random.Random(recipe.seed)
    first = work / "first"
    ended = _train(recipe, first, recipe.ranks)
    if "Traceback" in ended.output:
        return Result("failed", [f"a traceback was printed, {ended.problem}"])
    if ended.code == REJECTED:
        return Result("rejected", [], ended.output[-_SHOWN_CHARACTERS:])
    if ended.code != 0:
        return Result("failed", [ended.problem])
    problems = []
    steps = sorted(_steps(first))
    if steps != list(range(1, len(steps) + 1)) or len(steps) < _least_steps(recipe):
        problems.append(f"training.jsonl has the steps {steps}")
    earlier = [step for step in _saved_steps(first) if step < len(steps)]
    if numbers.random() < 0.3:
        problems += _check_stop(recipe, first, work / "stopped", numbers)
    elif earlier:
        problems += _check_resume(recipe, first, work / "resumed", numbers.choice(earlier))
    if earlier:
        step = numbers.choice(earlier)
        problems += _check_other_ranks(recipe, first, work / "other-ranks", step)
    problems += _check_commands(recipe, first, work)
    return Result("trained", problems)


def _least_steps(recipe: Recipe) -> int:
    return 2 if "step_scheduler.early_stopping" in recipe.options else STEPS


def _check_resume(recipe: Recipe, first: Path, copy: Path, step: int) -> Iterator[str]:
    _copy_up_to(first, copy, step)
    ended = _train(recipe, copy, recipe.ranks)
    for problem in [ended.problem] if ended.failed else differences(first, copy):
        yield f"resumed from step {step}: {problem}"


def _check_stop(
    recipe: Recipe, first: Path, stopped: Path, numbers: random.Random
) -> Iterator[str]:
    seconds = numbers.uniform(0, 3)
    number = numbers.choice([signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
    what = f"stopped by {number.name} {seconds:.2f} s after the first step"
    ended = _train(recipe, stopped, recipe.ranks, stop=(number, seconds))
    if ended.code not in (0, STOPPED, -signal.SIGKILL) or "Traceback" in ended.output:
        yield f"{what}: {ended.problem}"
        return
    if store_of(stopped).exists() and numbers.random() < 0.5:
        what += ", without its local directory"
        shutil.rmtree(stopped)
    ended = _train(recipe, stopped, recipe.ranks)
    for problem in [ended.problem] if ended.failed else differences(first, stopped):
        yield f"{what}, resumed: {problem}"


def _check_other_ranks(recipe: Recipe, first: Path, copy: Path, step: int) -> Iterator[str]:
    _copy_up_to(first, copy, step)
    ended = _train(recipe, copy, recipe.other_ranks)
    what = f"resumed from step {step} on {recipe.other_ranks} ranks"
    # The global batch may not be a multiple of what the ranks have, and Adafactor cannot update shards.
    may_end = (REJECTED, UNUSABLE) if "Adafactor" in str(recipe.options) else (REJECTED,)
    if ended.code in may_end and "Traceback" not in ended.output:
        return
    if ended.failed:
        yield f"{what}: {ended.problem}"
        return
    expected, found = _steps(first), _steps(copy)
    last = STEPS if _least_steps(recipe) == STEPS else min(max(expected), max(found))
    allowed = _allowed_difference(recipe)
    for number in range(step + 1, last + 1):
        ours, theirs = expected.get(number), found.get(number)
        problem = ""
        if ours is None or theirs is None:
            problem = "is missing"
        elif any(ours.get(key) != theirs.get(key) for key in _SAME_DATA):
            problem = "has other data"
        elif allowed and abs(ours["loss"] - theirs["loss"]) > allowed * abs(ours["loss"]):
            problem = "has another loss"
        if problem:
            yield f"{what}: step {number} {problem}: {ours} {theirs}"
            return


def _allowed_difference(recipe: Recipe) -> float | None:
    """The relative difference of losses on other ranks. Returns None when their random numbers differ."""
    text = json.dumps(recipe.options)
    if "model" not in recipe.options:
        text += recipe.example.read_text()
    if any(each in text for each in _BY_RANK):
        return None
    return 2e-2 if "bfloat16" in text else 5e-4


def _check_commands(recipe: Recipe, run: Path, work: Path) -> Iterator[str]:
    store = store_of(run)
    kind = ["--merge"] if "peft.r" in recipe.options else ["--to", "hf"]
    newest = _checkpoint(run, max(_saved_steps(run)))
    commands = [["verify", run], ["export", *kind, newest, "--output", work / "export"]]
    if store.exists():
        commands.append(["verify", "--deep", f"file://{store}"])
    for words in commands:
        ended = _wait(_start("ckpt", *map(str, words)))
        if ended.code != 0:
            yield f"ckpt {words[0]}: {ended.problem}"


# ---------------------------------------------------------------- what a run has written


def _steps(run: Path) -> dict[int, dict[str, Any]]:
    """The steps of training.jsonl, without the fields that measure time and memory."""
    return {line["step"]: line for line in step_lines(run / "training.jsonl", MEASURED)}


def _saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in run.glob("epoch_*_step_*"))


def _checkpoint(run: Path, step: int) -> Path:
    [path] = run.glob(f"epoch_*_step_{step}")
    return path


def _copy_up_to(run: Path, copy: Path, step: int) -> None:
    """Copy a run directory without the checkpoints after *step*."""
    shutil.copytree(run, copy, symlinks=True)
    for later in _saved_steps(copy):
        if later > step:
            shutil.rmtree(_checkpoint(copy, later))
    shutil.rmtree(copy / "averaged", ignore_errors=True)


# ---------------------------------------------------------------- processes


def _train(
    recipe: Recipe, run: Path, ranks: int, stop: tuple[signal.Signals, float] | None = None
) -> Ended:
    """Train to the end, or until the signal *stop*, so many seconds after the first step."""
    process = _start("ckpt-train", *recipe.flags(run, ranks))
    log, end = run / "training.jsonl", time.monotonic() + TIMEOUT_SECONDS
    while stop is not None and process.poll() is None and time.monotonic() < end:
        if log.exists() and log.stat().st_size > 0:
            number, seconds = stop
            time.sleep(seconds)
            kill = os.killpg if number == signal.SIGKILL else os.kill
            kill(process.pid, number)
            break
        time.sleep(0.02)
    return _wait(process)


def _start(name: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program(name), *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _wait(process: subprocess.Popen[str]) -> Ended:
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        return Ended(process.returncode, output)
    except subprocess.TimeoutExpired:
        # Its ranks have the session of the process.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Ended(None, output)
