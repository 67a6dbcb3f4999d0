"""Train a recipe, resume it in two ways, verify and export it; and report what differs from the first run."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from automodel_ckpt.checkpoint.parts.manifest import Manifest
from tools.random_recipes.draw import STEPS, Recipe, store_of
from tools.support import MEASURED, environment, program, step_lines

TIMEOUT_SECONDS = 600
"""A start that prints nothing for as long is reported as one that hangs, also on a machine with other work."""
_MOST_TIMEOUTS = 6
"""A start that takes this many times longer is reported as well."""
STOPPED = 75
REJECTED = 2
UNUSABLE = 3
_SAME_DATA = ("label_tokens", "sample_ids")
"""Fields of a step that do not depend on the number of ranks."""
_COUNTS = {"num_equal", "num_unread"}
"""What `ckpt diff` reports of tensors that are equal."""
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
    # The global batch may not be a multiple of what the ranks have.
    may_end = {REJECTED, UNUSABLE} if _only_unsharded(recipe) else {REJECTED}
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


def _only_unsharded(recipe: Recipe) -> bool:
    """Whether the optimizer cannot update shards, which other ranks may have."""
    return "torch.optim.Adafactor" in json.dumps(recipe.options)


def _allowed_difference(recipe: Recipe) -> float | None:
    """The relative difference of losses on another number of ranks; None if their random numbers differ."""
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
        ended = _ckpt(*words)
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


def differences(first: Path, second: Path) -> Iterator[str]:
    """What differs between two runs that should be equal."""
    ours, theirs = _steps(first), _steps(second)
    for step in sorted(ours.keys() | theirs.keys()):
        if ours.get(step) != theirs.get(step):
            yield f"step {step} differs: {ours.get(step)} {theirs.get(step)}"
            break
    pair = [step_lines(run / "validation.jsonl", MEASURED) for run in (first, second)]
    if pair[0] != pair[1]:
        yield f"validation.jsonl differs: {pair[0]} {pair[1]}"
    last = max(_saved_steps(first))
    if last not in _saved_steps(second):
        yield f"the checkpoints are those of {_saved_steps(second)}, not of {_saved_steps(first)}"
        return
    ours_last, theirs_last = _checkpoint(first, last), _checkpoint(second, last)
    yield from _tensor_differences(ours_last, theirs_last)
    for name in ("rng", "dataloader"):
        yield from _file_differences(ours_last / name, theirs_last / name)


def _tensor_differences(first: Path, second: Path) -> Iterator[str]:
    ended = _ckpt("diff", "--json", first, second)
    if ended.code != 0:
        yield f"ckpt diff: {ended.problem}"
        return
    found = json.loads(ended.output)
    for tree, changes in found["trees"].items():
        different = {key: value for key, value in changes.items() if value and key not in _COUNTS}
        if different:
            yield f"{tree} of the last checkpoints differs: {str(different)[:_SHOWN_CHARACTERS]}"
    if found["not_compared"]:
        yield f"not compared: {found['not_compared']}"


def _file_differences(first: Path, second: Path) -> Iterator[str]:
    both = (first, second)
    found = [path.relative_to(each) for each in both for path in each.rglob("*") if path.is_file()]
    for name in sorted(set(found)):
        ours, theirs = first / name, second / name
        if not (ours.exists() and theirs.exists()):
            yield f"only one checkpoint has {first.name}/{name}"
        elif ours.read_bytes() != theirs.read_bytes() and not _are_equal(ours, theirs):
            yield f"{first.name}/{name} differs"


def _are_equal(first: Path, second: Path) -> bool:
    """Whether two files have equal values: pickle writes equal numbers and mappings in more than one way."""
    return _is_equal(_values_in(first), _values_in(second))


def _values_in(file: Path) -> Any:
    """The object in a file of torch.save, or those of several ranks, which are parts of one file."""
    if file.suffix == ".pt":
        return torch.load(file, weights_only=True)
    checkpoint = file.parent.parent
    data = file.read_bytes()
    values = {}
    for name, blob in Manifest.read(checkpoint).trees[file.parent.name].objects.items():
        if blob.file == str(file.relative_to(checkpoint)):
            content = io.BytesIO(data[blob.start : blob.start + blob.nbytes])
            values[name] = torch.load(content, weights_only=True)
    return values


def _is_equal(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            _is_equal(each, second[key]) for key, each in first.items()
        )
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    return bool(first == second)


# ---------------------------------------------------------------- processes


def _train(
    recipe: Recipe, run: Path, ranks: int, stop: tuple[signal.Signals, float] | None = None
) -> Ended:
    """Train to the end, or until the signal *stop*, so many seconds after the first step."""
    process = _start([program("ckpt-train"), *recipe.flags(run, ranks)])
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while stop is not None and process.poll() is None and time.monotonic() < deadline:
        if _has_steps(run):
            time.sleep(stop[1])
            if stop[0] == signal.SIGKILL:
                os.killpg(process.pid, stop[0])
            else:
                process.send_signal(stop[0])
            break
        time.sleep(0.02)
    return _wait(process)


def _has_steps(run: Path) -> bool:
    log = run / "training.jsonl"
    return log.exists() and log.stat().st_size > 0


def _ckpt(*arguments: object) -> Ended:
    return _wait(_start([program("ckpt"), *map(str, arguments)]))


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _wait(process: subprocess.Popen[str]) -> Ended:
    num_printed = 0
    for _ in range(_MOST_TIMEOUTS):
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as expired:
            num_before, num_printed = num_printed, len(expired.output or b"")
            if num_printed == num_before:
                break
        else:
            return Ended(process.returncode, output)
    # Its ranks have the session of the process.
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    return Ended(None, output)
