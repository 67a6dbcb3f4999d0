"""``ckpt-train --selftest-resume``: check on this node that a recipe resumes exactly.

Three runs in a temporary directory, each started like any other: one without interruption, one that stops halfway as if
by a signal, and one that resumes it. Each records its samples and the digests of its state after every step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, ValueDict, Values
from automodel_ckpt.cli.launch.node_resources import visible_gpus
from automodel_ckpt.cli.launch.ranks import started_world_size
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.overrides import CommandLine, parse
from automodel_ckpt.config.schema_keys import is_number
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import EXIT_DONE, EXIT_INTERNAL, EXIT_STOPPED, RecipeError

DEFAULT_STEPS = 6
# Relative tolerances on another number of ranks: sums are computed in another order, and a few steps accumulate it.
TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
_HALF_DTYPES = ("bfloat16", "float16")
_ALWAYS = (
    "--step_scheduler.max_time=null",
    "--step_scheduler.ckpt_every_steps=null",
    "--step_scheduler.ckpt_every_epochs=null",
    "--step_scheduler.ckpt_every_minutes=null",
    "--step_scheduler.ckpt_on_best=false",
    "--step_scheduler.val_every_steps=null",
    "--step_scheduler.on_spike=null",  # an error in the run without checkpoints
    "--checkpoint.save_consolidated=false",
    "--checkpoint.export_best=false",
    "--checkpoint.restore_from=null",
    "--checkpoint.remote=null",
    "--checkpoint.scratch_dir=null",
    "--hub=null",
    "--logging.trackers={}",
    # Their files would replace the files of the user's runs.
    "--profile=null",
)

_NUMBERS = ("lr", "loss", "grad_norm")
_DIFFERENT = "different"

Step = Values
Run = Sequence[Sequence[Step]]
"""The steps of each rank: run[rank][step]."""
Observe = Callable[[LoadedRecipe, Path, int | None], tuple[LoadedRecipe, type]]
"""(recipe, directory for notes, step to stop after) -> the checked recipe, and its class that records each step."""


def _planned_steps(line: CommandLine, max_steps: int | None) -> int:
    """Return the number of steps of the run without interruption. Raises :class:`RecipeError`."""
    default = min(DEFAULT_STEPS, max_steps or DEFAULT_STEPS)
    (steps,) = line.modes.get("selftest_steps", [str(default)])
    if not is_number(steps) or int(steps) < 2:
        raise _one_step(
            "step_scheduler.max_steps, --selftest-steps",
            steps,
            "test with more steps (--selftest-steps 6)",
        )
    return int(steps)


def _planned_flags(line: CommandLine) -> tuple[LaunchFlags, LaunchFlags]:
    """Return the launch flags before and after the resume. Raises :class:`RecipeError`."""
    (ranks,) = line.modes.get("selftest_nproc", [line.flags.nproc_per_node])
    if not is_number(ranks) or int(ranks) < 1:
        raise RecipeError("the number of ranks must be 1 or more", "--selftest-nproc", ranks)
    if line.flags.nnodes != "1" or started_world_size(os.environ, line.flags):
        raise RecipeError(
            "the selftest starts its own ranks, without --nnodes, torchrun and srun",
            "--selftest-resume",
            line.flags.nnodes,
        )
    flags = dataclasses.replace(line.flags, max_restarts=0)
    return flags, dataclasses.replace(flags, nproc_per_node=ranks)


_one_step = partial(
    RecipeError, "the selftest needs at least 2 steps: a run of a single step has nothing to resume"
)


def selftest(recipe: LoadedRecipe, line: CommandLine, observe: Observe) -> int:
    """Run the selftest and print the comparison (as JSON with ``--json``). Returns 0 if the resumed run agrees.

    Raises :class:`RecipeError` for an invalid command line. If one of the runs fails, returns its exit code.
    """
    num_steps = _planned_steps(line, recipe.config.step_scheduler.max_steps)
    flags = _planned_flags(line)
    with tempfile.TemporaryDirectory(prefix="ckpt-selftest-") as scratch:
        runs = Runs(recipe, num_steps, Path(scratch), observe)
        try:
            found = runs.compare(*flags)
        except RunFailed as failure:
            name, code, output = failure.args
            print(output, file=sys.stderr)
            print(
                f"selftest: the run {name!r} ended with exit code {code}; see above",
                file=sys.stderr,
            )
            return code or EXIT_INTERNAL
    if "json" in line.modes:
        print(json.dumps(found, indent=2))
    else:
        print(report(found))
    return EXIT_INTERNAL if found["verdict"] == _DIFFERENT else EXIT_DONE


class RunFailed(Exception):
    """(name, exit code, output) of one of the three runs that did not end as planned."""


@dataclass(frozen=True)
class Runs:
    """The three runs of a recipe below *scratch*."""

    recipe: LoadedRecipe
    num_steps: int
    scratch: Path
    observe: Observe

    def compare(self, flags: LaunchFlags, resumed_flags: LaunchFlags) -> ValueDict:
        """Execute the three runs and compare them. Raises :class:`RunFailed`, or :class:`RecipeError` for one step."""
        # Without checkpoints: the next run has the same directory, and would resume from them.
        straight = self._run("straight", flags, None, EXIT_DONE, "--checkpoint.enabled=false")
        if len(straight[0]) < 2:
            raise _one_step(
                "--selftest-resume",
                "the data ended after 1 step",
                "test it with more data or epochs (--step_scheduler.num_epochs)",
            )
        # The run may be shorter than planned, and a step has to be left for the resume.
        stop_after = min(self.num_steps // 2, max(1, len(straight[0]) - 1))
        stopped = self._run("stopped", flags, stop_after, EXIT_STOPPED, "--checkpoint.enabled=true")
        resumed = self._run("resumed", resumed_flags, None, EXIT_DONE, "--checkpoint.enabled=true")
        if len(stopped) == len(resumed):
            joined = [before + after for before, after in zip(stopped, resumed, strict=True)]
            return compare(straight, joined, stop_after)
        # All ranks log the same numbers: rank 0's numbers precede the numbers of each resumed rank.
        joined = [stopped[0] + after for after in resumed]
        return compare(straight, joined, stop_after, self._tolerance())

    def _loaded(self, *more: str) -> LoadedRecipe:
        directory = f"--checkpoint.checkpoint_dir={self.scratch / 'run'}"
        steps = f"--step_scheduler.max_steps={self.num_steps}"
        return self.recipe.with_overrides(parse([*_ALWAYS, directory, steps, *more]).overrides)

    def _run(
        self, name: str, flags: LaunchFlags, stop_after: int | None, expected: int, *more: str
    ) -> list[list[Step]]:
        """Execute one run in a child process, so that this one does not import torch; return each rank's steps."""
        notes, output = self.scratch / name, self.scratch / f"{name}.log"
        notes.mkdir()
        loaded = self._loaded(*more)
        child = os.fork()
        if child == 0:
            _launch(loaded, flags, lambda: self.observe(loaded, notes, stop_after), output)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        files = sorted(notes.iterdir(), key=lambda path: int(path.stem.removeprefix("rank_")))
        steps = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
        if code != expected or not steps:
            raise RunFailed(name, code, output.read_text(errors="replace"))
        return steps

    def _tolerance(self) -> float:
        config = self._loaded().config
        # Rounding dominates: sums in half precision depend much more on their order.
        dtypes = [config.distributed.mixed_precision, getattr(config.model, "dtype", None)]
        if config.distributed.mixed_precision == "auto" and visible_gpus(os.environ):
            dtypes.append("bfloat16")
        return HALF_TOLERANCE if any(dtype in _HALF_DTYPES for dtype in dtypes) else TOLERANCE


def _launch(
    loaded: LoadedRecipe,
    flags: LaunchFlags,
    prepare: Callable[[], tuple[LoadedRecipe, type]],
    output: Path,
) -> None:
    """Launch the run in the forked process, with its output redirected to *output*. Does not return."""
    from automodel_ckpt.cli.launch.launcher import launch
    from automodel_ckpt.cli.launch.process import exit_now

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        # The descriptors, not sys.stdout: libraries in C and forked ranks write to them.
        os.dup2(descriptor, stream)
    exit_now(launch(loaded, flags, prepare))  # skip the atexit handlers inherited from the parent


# ---------------------------------------------------------------- comparison


def compare(straight: Run, resumed: Run, stopped_after: int, tolerance: float = 0.0) -> ValueDict:
    """Return the document of ``--selftest-resume --json``, from the records of ``training/selftest_probe.py``.

    On the same number of ranks, all values must be bit-identical. On another number, samples and learning rates must be
    equal, and losses and gradient norms within the relative *tolerance*, unless the model has dropout: ranks draw their
    own random numbers.
    """
    is_exact = len(straight) == len(resumed)
    first = next(_differences(straight, resumed, is_exact=is_exact), None)
    largest = {
        name: _largest_difference(name, straight[0], resumed[0])
        for name in ("loss", "grad_norm")
        if not is_exact
    }
    judged = is_exact or not any(step["has_dropout"] for step in straight[0])
    verdict = "bit-identical" if is_exact else "equal within tolerance"
    if first is not None or (judged and max(largest.values(), default=0.0) > tolerance):
        verdict = _DIFFERENT
    elif not judged:
        verdict = "same samples"
    return {
        "num_steps": len(straight[0]),
        "stopped_after": stopped_after,
        "num_ranks": [len(straight), len(resumed)],
        "first_difference": first,
        "steps": [
            {
                "step": step["step"],
                "num_samples": len(step["samples"]),
                **{name: _number(step[name]) for name in _NUMBERS},
            }
            for step in straight[0]
        ],
        "largest": largest,
        "tolerance": tolerance,
        "judged": judged,
        "verdict": verdict,
    }


def _differences(straight: Run, resumed: Run, *, is_exact: bool) -> Iterator[ValueDict]:
    """Yield the differences by step and rank: quantities, then tensors, then whole attributes."""
    for number in range(min(len(straight[0]), len(resumed[0]))):
        for rank in range(len(straight) if is_exact else 1):
            step = straight[rank][number]
            one = _compared(step, is_exact=is_exact)
            other = _compared(resumed[rank][number], is_exact=is_exact)
            for name in {**one, **other}:
                if one.get(name) != other.get(name):
                    yield {
                        "step": step["step"],
                        "rank": rank,
                        "quantity": name,
                        "straight": one.get(name, "missing"),
                        "resumed": other.get(name, "missing"),
                    }
    before, after = len(straight[0]), len(resumed[0])
    if before != after:
        yield {
            "step": min(before, after) + 1,
            "rank": 0,
            "quantity": "number of steps",
            "straight": str(before),
            "resumed": str(after),
        }


def _compared(step: Step, *, is_exact: bool) -> TextDict:
    """Return the values of a step that must be equal, as text, in the order in which they are reported."""
    samples = {"samples": str(step["samples"])}
    if not is_exact:
        return samples | {"lr": repr(_number(step["lr"]))}
    numbers = {name: repr(_number(step[name])) for name in _NUMBERS}
    state = dict(sorted(step["state"].items(), key=lambda item: ("/" not in item[0], item[0])))
    return samples | numbers | state


def _largest_difference(name: str, straight: Sequence[Step], resumed: Sequence[Step]) -> float:
    """Return the largest relative difference; infinity if only one of two numbers is finite."""
    largest = 0.0
    for one, other in zip(straight, resumed, strict=False):
        a, b = _number(one[name]), _number(other[name])
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        difference = abs(a - b) / max(abs(a), abs(b))
        largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest


def _number(text: str) -> float:
    """Parse a number that was written with ``float.hex``, or in decimal."""
    return float.fromhex(text) if "0x" in text else float(text)


def report(found: Values) -> str:
    """Format the comparison as text."""
    before, after = found["num_ranks"]
    ranks = counted(before, "rank")
    if after != before:
        ranks += f", resumed on {after}"
    stop = f"{found['num_steps']} steps, stopped after step {found['stopped_after']}"
    lines = [
        f"step {step['step']}  samples {step['num_samples']}  loss {step['loss']:.6g}  "
        f"grad norm {step['grad_norm']:.6g}  lr {step['lr']:.6g}"
        for step in found["steps"]
    ]
    lines.append(f"{found['verdict']}: {stop}, {ranks}")
    first = found["first_difference"]
    if first is not None:
        place = f"step {first['step']}, rank {first['rank']}, {first['quantity']}"
        values = f"straight {first['straight']}, resumed {first['resumed']}"
        lines.append(f"  first difference: {place}: {values}")
        if first["step"] <= found["stopped_after"]:
            lines.append(
                "  it is before the stop: two runs differ even without a resume (deterministic: true may help)"
            )
    limit = f"tolerance {found['tolerance']:g}"
    if not found["judged"]:
        limit = "not compared: the model has dropout"
    for name, value in found["largest"].items():
        lines.append(f"  largest relative difference of {name}: {value:.3g} ({limit})")
    return "\n".join(lines)
