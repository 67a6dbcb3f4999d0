"""``ckpt-train --selftest-resume``: check on this node that a recipe resumes exactly.

Three runs in a temporary directory, each started like any other: one without interruption, one that stops halfway as if
by a signal, and one that resumes it. Each records its samples and the digests of its state after every step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.launch.started_ranks import started_world_size
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.overrides import CommandLine, parse
from automodel_ckpt.config.schema_keys import is_number
from automodel_ckpt.config.tree.flags import LaunchFlags
from automodel_ckpt.errors import EXIT_DONE, EXIT_INTERNAL, EXIT_STOPPED, RecipeError

DEFAULT_STEPS = 6
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
    # Their files would replace those of the user's runs.
    "--throughput=null",
    "--profile=null",
)

_NUMBERS = ("lr", "loss", "grad_norm")

Step = Mapping[str, Any]
"""What :mod:`automodel_ckpt.training.selftest_probe` recorded of a step on a rank."""
Run = Sequence[Sequence[Step]]
"""The steps of each rank: run[rank][step]."""
Observe = Callable[[LoadedRecipe, Path, int | None], tuple[LoadedRecipe, type]]
"""(recipe, directory for notes, step to stop after) -> the checked recipe, and its class that records each step."""


@dataclass(frozen=True)
class Plan:
    """Number of steps, and launch flags."""

    num_steps: int
    flags: LaunchFlags

    @property
    def stop_after(self) -> int:
        return self.num_steps // 2


def plan_of(line: CommandLine, max_steps: int | None) -> Plan:
    """Build the plan from the command line, and from the recipe's *max_steps*. Raises :class:`RecipeError`."""
    default = DEFAULT_STEPS
    if "selftest_steps" not in line.modes and max_steps is not None and max_steps < default:
        default = max_steps
        if default < 2:
            hint = "test the recipe with more steps (--selftest-steps 6)"
            _fail_with_one_step("step_scheduler.max_steps", default, hint)
    (steps,) = line.modes.get("selftest_steps", [str(default)])
    if not is_number(steps) or int(steps) < 2:
        _fail(
            "the selftest needs at least 2 steps", "--selftest-steps", steps, "set it to 2 or more"
        )
    if line.flags.nnodes != "1" or started_world_size(os.environ, line.flags):
        _fail(
            "the selftest runs on a single node and starts its own ranks",
            "--selftest-resume",
            line.flags.nnodes,
            "run it without --nnodes, torchrun and srun",
        )
    return Plan(int(steps), dataclasses.replace(line.flags, max_restarts=0))


def _fail_with_one_step(where: str, value: object, hint: str) -> NoReturn:
    _fail(
        "the selftest needs at least 2 steps: a run of a single step has nothing to resume",
        where,
        value,
        hint,
    )


def _fail(what: str, where: str, value: object, hint: str) -> NoReturn:
    raise RecipeError(what, where=where, value=value, hint=hint)


def selftest(recipe: LoadedRecipe, line: CommandLine, observe: Observe) -> int:
    """Run the selftest and print the comparison (as JSON with ``--json``). Returns 0 if the resumed run agrees.

    Raises :class:`RecipeError` for an invalid command line. If one of the runs fails, returns its exit code.
    """
    plan = plan_of(line, recipe.config.step_scheduler.max_steps)
    with tempfile.TemporaryDirectory(prefix="ckpt-selftest-") as scratch:
        runs = Runs(recipe, plan, Path(scratch), observe)
        try:
            found = runs.compare()
        except RunFailed as failure:
            print(failure.output, file=sys.stderr)
            print(
                f"selftest: the run {failure.name!r} ended with exit code {failure.code}; see above",
                file=sys.stderr,
            )
            return failure.code or EXIT_INTERNAL
    if "json" in line.modes:
        print(json.dumps(found, indent=2))
    else:
        print(report(found))
    return EXIT_INTERNAL if found["first_difference"] else EXIT_DONE


class RunFailed(Exception):
    """One of the three runs did not end as planned."""

    def __init__(self, name: str, code: int, output: str) -> None:
        super().__init__(name)
        self.name, self.code, self.output = name, code, output


@dataclass(frozen=True)
class Runs:
    """The three runs of a recipe below *scratch*."""

    recipe: LoadedRecipe
    plan: Plan
    scratch: Path
    observe: Observe

    def compare(self) -> dict[str, Any]:
        """Execute the three runs and compare them. Raises :class:`RunFailed`, or :class:`RecipeError` for one step."""
        # Without checkpoints: the next run has the same directory, and would resume from them.
        straight = self._run("straight", None, EXIT_DONE, "--checkpoint.enabled=false")
        if len(straight[0]) < 2:
            hint = "test it with more data or epochs (--step_scheduler.num_epochs)"
            _fail_with_one_step("--selftest-resume", "the data ended after 1 step", hint)
        # The run may be shorter than planned, and a step has to be left for the resume.
        stop_after = min(self.plan.stop_after, max(1, len(straight[0]) - 1))
        stopped = self._run("stopped", stop_after, EXIT_STOPPED, "--checkpoint.enabled=true")
        resumed = self._run("resumed", None, EXIT_DONE, "--checkpoint.enabled=true")
        joined = [before + after for before, after in zip(stopped, resumed, strict=True)]
        return compare(straight, joined, stop_after)

    def _loaded(self, *more: str) -> LoadedRecipe:
        directory = f"--checkpoint.checkpoint_dir={self.scratch / 'run'}"
        steps = f"--step_scheduler.max_steps={self.plan.num_steps}"
        ours = parse([*_ALWAYS, directory, steps, *more]).overrides
        return self.recipe.with_overrides(ours)

    def _run(
        self, name: str, stop_after: int | None, expected: int, *more: str
    ) -> list[list[Step]]:
        """Execute one run in a child process, so that this one does not import torch; return each rank's steps."""
        notes, output = self.scratch / name, self.scratch / f"{name}.log"
        notes.mkdir()
        loaded = self._loaded(*more)
        child = os.fork()
        if child == 0:
            _launch(
                loaded, self.plan.flags, lambda: self.observe(loaded, notes, stop_after), output
            )
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        files = sorted(notes.iterdir(), key=lambda path: int(path.stem.removeprefix("rank_")))
        steps = [_lines(path) for path in files]
        if code != expected or not steps:
            raise RunFailed(name, code, output.read_text(errors="replace"))
        return steps


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


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- comparing the runs


def compare(straight: Run, resumed: Run, stopped_after: int) -> dict[str, Any]:
    """Return the document of ``--selftest-resume --json``: all values must be bit-identical."""
    first = None
    steps = []
    lengths = len(straight[0]), len(resumed[0])
    for number in range(min(lengths)):
        ranks = [steps_of_rank[number] for steps_of_rank in straight]
        others = [steps_of_rank[number] for steps_of_rank in resumed]
        found = [
            _difference(rank, *pair) for rank, pair in enumerate(zip(ranks, others, strict=True))
        ]
        difference = next(filter(None, found), None)
        first = first or difference
        steps.append(
            {
                "step": ranks[0]["step"],
                "num_samples": len(ranks[0]["samples"]),
                **{name: _number(ranks[0][name]) for name in _NUMBERS},
                "digests": _combined(ranks),
                "same": difference is None,
            }
        )
    if first is None and lengths[0] != lengths[1]:
        first = _described(min(lengths) + 1, 0, "number of steps", *lengths)
    return {
        "num_steps": lengths[0],
        "stopped_after": stopped_after,
        "num_ranks": len(straight),
        "first_difference": first,
        "steps": steps,
        "verdict": "different" if first else "bit-identical",
    }


def _difference(rank: int, one: Step, other: Step) -> dict[str, Any] | None:
    """Return the first difference of a step on one rank: quantities, then whole attributes, then their tensors."""
    for name in ("samples", *_NUMBERS):
        if one[name] != other[name]:
            return _described(one["step"], rank, name, one[name], other[name])
    state, other_state = one["state"], other["state"]
    for name in sorted(state.keys() | other_state.keys(), key=lambda name: ("/" not in name, name)):
        digests = [digests.get(name, "missing") for digests in (state, other_state)]
        if digests[0] != digests[1]:
            return _described(one["step"], rank, name, *digests)
    return None


def _described(step: int, rank: int, name: str, one: Any, other: Any) -> dict[str, Any]:
    texts = [repr(_number(each)) if name in _NUMBERS else str(each) for each in (one, other)]
    values = {"straight": texts[0], "resumed": texts[1]}
    return {"step": step, "rank": rank, "quantity": name, **values}


def _combined(ranks: Sequence[Step]) -> dict[str, str]:
    """Return one short digest over all ranks for each attribute with state."""
    hashes: dict[str, Any] = {}
    for rank in ranks:
        for name, digest in rank["state"].items():
            found = hashes.setdefault(name.partition("/")[0], hashlib.blake2b(digest_size=6))
            found.update(f"{name} {digest}\n".encode())
    return {name: hashes[name].hexdigest() for name in sorted(hashes)}


def _number(text: str) -> float:
    """Parse a number that was written with ``float.hex``, or in decimal."""
    try:
        return float.fromhex(text)
    except ValueError:
        return float(text)


def report(found: Mapping[str, Any]) -> str:
    """Format the comparison as text."""
    ranks = counted(found["num_ranks"], "rank")
    stop = f"{found['num_steps']} steps, stopped after step {found['stopped_after']}"
    lines = [_step_line(step) for step in found["steps"]]
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
    return "\n".join(lines)


def _step_line(step: Mapping[str, Any]) -> str:
    numbers = f"loss {step['loss']:.6g}  grad norm {step['grad_norm']:.6g}  lr {step['lr']:.6g}"
    digests = "  ".join(f"{name} {digest}" for name, digest in step["digests"].items())
    same = "same" if step["same"] else "different"
    return f"step {step['step']}  samples {step['num_samples']}  {numbers}  {digests}  {same}"
