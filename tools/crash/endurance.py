"""Endurance: the trainer, killed at random instants until it has finished, must end where an undisturbed run ends.

Each start of ``ckpt-train`` (two ranks, the tiny recipe) is killed, with all its processes, at an instant uniform
over 20 seconds. When a run finishes before there were enough kills, the next one begins in a new directory.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from automodel_ckpt.checkpoint import Manifest
from automodel_ckpt.checkpoint.files import layout
from tools.crash import inspect
from tools.crash.record import Record

LONGEST_SECONDS = 20.0
_ROOT = Path(__file__).resolve().parents[2]
_RECIPE = "examples/llm_finetune/tiny_llama_python_docs.yaml"
_CLOCKS = {"elapsed_seconds"}
_LEFT_OPEN = "left open"
_NOT_REPEATED = {"timestamp", "tps", "tps_per_gpu", "mfu", "mem", "seconds"}
"""Fields of training.jsonl that tell of the machine, not of the training."""


def command(directory: Path, steps: int) -> list[str]:
    """Train in *directory* to step *steps*, with a checkpoint every four steps."""
    overrides = {
        "checkpoint.checkpoint_dir": directory,
        "checkpoint.save_consolidated": "false",
        "step_scheduler.max_steps": steps,
        "step_scheduler.num_epochs": 10_000,
        "step_scheduler.ckpt_every_steps": 4,
        "logging.sample_ids": "true",
    }
    flags = [part for name, value in overrides.items() for part in (f"--{name}", str(value))]
    program = str(Path(sys.executable).with_name("ckpt-train"))
    return [program, "--nproc-per-node=2", str(_ROOT / _RECIPE), *flags]


def train(directory: Path, steps: int, *, kill_after: float | None = None) -> int | None:
    """The exit code of one start; None where it was killed, *kill_after* seconds from its start."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (
        open(directory.with_suffix(".log"), "ab") as log,
        subprocess.Popen(
            command(directory, steps),
            stdout=log,
            stderr=log,
            cwd=directory.parent,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            return process.wait(kill_after)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_session(process.pid)


def kill_session(session: int) -> None:
    """Send SIGKILL to every process of the session, until none is left."""
    # With `nice` on a busy machine, it can take half a minute until they have released their memory.
    end = time.monotonic() + 180
    while left := [*members(session)]:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > end:
            raise RuntimeError(f"processes {left} do not end")
        time.sleep(0.01)


def members(session: int) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getsid(int(entry)) == session and not _is_zombie(entry):
                yield int(entry)
        except (ProcessLookupError, FileNotFoundError):
            continue


def _is_zombie(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def result_of(directory: Path, steps: int) -> dict[str, Any]:
    """All that a run ends with: every digest of its last checkpoint, and its log, but for clocks."""
    checkpoint = directory / f"epoch_{_newest_epoch(directory)}_step_{steps}"
    manifest = Manifest.read(checkpoint)
    tensors = {
        f"{tree}.{fqn} {piece.offsets}": piece.digest
        for tree, content in manifest.trees.items()
        for fqn, tensor in content.tensors.items()
        for piece in tensor.slices
    }
    blobs = {
        f"{tree}.{fqn}": blob.digest
        for tree, c in manifest.trees.items()
        for fqn, blob in c.objects.items()
    }
    states = {
        file: _plain_state(torch.load(checkpoint / file, weights_only=True))
        for file in manifest.files
        if file.endswith(".pt")
    }
    logs = {
        "log": log_of(directory / "training.jsonl"),
        "validations": log_of(directory / "validation.jsonl"),
    }
    pointers = {name: inspect.target(directory / name) for name in layout.POINTERS}
    return {
        "tensors": tensors,
        "values": blobs,
        "state": _flat(states),
        "pointers": pointers,
        **logs,
    }


def _plain_state(value: Any) -> Any:
    """An object's state as text and numbers that compare, clocks aside."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: _plain_state(entry) for key, entry in value.items() if key not in _CLOCKS}
    if isinstance(value, list | tuple):
        return [_plain_state(entry) for entry in value]
    return value


def _flat(states: dict[str, Any]) -> dict[str, Any]:
    """Entries by file and key; of a checkpoint whose validation a signal cut off, without what that leaves open."""
    entries = {
        f"{file}: {key}": value for file, state in states.items() for key, value in state.items()
    }
    if entries.get("step_scheduler.pt: validation_is_due"):
        entries |= {
            "step_scheduler.pt: best": _LEFT_OPEN,
            "step_scheduler.pt: validation_is_due": _LEFT_OPEN,
        }
    return entries


def _newest_epoch(directory: Path) -> int:
    return inspect.checkpoints(directory)[0].epoch


def log_of(path: Path) -> list[dict[str, Any]]:
    """The lines about steps, without what tells of the machine; none where there is no log."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if k not in _NOT_REPEATED}
        for line in lines
        if "event" not in line
    ]


def differences(directory: Path, right: dict[str, Any], steps: int) -> list[str]:
    """What is not as in the undisturbed run."""
    if inspect.checkpoints(directory)[:1] == [] or inspect.checkpoints(directory)[0].step != steps:
        return [f"the last checkpoint is {inspect.checkpoints(directory)[:1]}"]
    mine = result_of(directory, steps)
    wrong = [
        f"{kind} differ: {places}"
        for kind in right
        if (places := _differing(mine[kind], right[kind]))
    ]
    wrong += (
        []
        if [line["step"] for line in mine["log"]] == list(range(1, steps + 1))
        else ["steps miss or stand twice"]
    )
    return wrong + inspect.damage(directory) + inspect.wrong_pointers(directory)


def _differing(mine: Any, right: Any) -> str:
    """Some of the places where two results differ."""
    if isinstance(mine, list):
        mine, right = dict(enumerate(mine)), dict(enumerate(right))
    differing = []
    for key in sorted(mine.keys() | right.keys()):
        if _other(mine.get(key), right.get(key)):
            differing.append(f"{key} ({mine.get(key)}, not {right.get(key)})")
    text = ", ".join(differing[:3])
    return text[:600]


def _other(mine: Any, right: Any) -> bool:
    return mine != right and _LEFT_OPEN not in (mine, right)


def run(*, points: int, seed: int, seconds: float, steps: int = 200) -> Record:
    """The campaign with *points* kills; those of its record are the kills, and the finished runs."""
    chance = random.Random(seed)
    record = Record(
        "endurance", {"points": points, "seed": seed, "seconds": seconds, "steps": steps}
    )
    base = Path(tempfile.mkdtemp(prefix="endurance-"))
    end = time.monotonic() + seconds
    try:
        if code := train(base / "undisturbed", steps):
            record.add("undisturbed", [f"exit code {code}"], log=_tail(base / "undisturbed"))
            return record
        right, run_number = result_of(base / "undisturbed", steps), 0
        while record.outcomes["killed"] < points and time.monotonic() < end:
            run_number += 1
            _to_the_end(base / f"killed-{run_number}", right, record, chance, points, steps)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return record


def _to_the_end(
    directory: Path,
    right: dict[str, Any],
    record: Record,
    chance: random.Random,
    kills: int,
    steps: int,
) -> None:
    """One run, killed while there are kills left, and how it ends."""
    while True:
        wait = chance.uniform(0, LONGEST_SECONDS) if record.outcomes["killed"] < kills else None
        code = train(directory, steps, kill_after=wait)
        if code is None:
            record.add("killed")
        elif code:
            record.add("failed", [f"exit code {code}"], log=_tail(directory))
            return
        else:
            record.add(
                "finished as if undisturbed",
                differences(directory, right, steps),
                directory=str(directory),
            )
            return


def _tail(directory: Path) -> str:
    return directory.with_suffix(".log").read_text()[-2000:]
