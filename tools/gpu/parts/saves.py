"""Saves of a 1B model with its optimizer, synchronous and asynchronous, and a resume after kill -9."""

import os
import shutil
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.crash.results import differences
from tools.gpu import ours
from tools.gpu.session import Figures, PartRun
from tools.gpu.shapes import LLAMA_1B, LLAMA_8B, Work, work_of
from tools.support import log_lines, step_lines

_CHUNK = 1 << 30
_KILLED_AFTER = 5
_KILL_STEPS = 8


def run(part: PartRun) -> None:
    """Asynchronous saves, the copy that they are compared with, a resume, and synchronous saves."""
    session = part.session
    # The disk has 64 GB: checkpoints of 15 GB each and a base of 8B do not fit.
    part.remove_base(str(LLAMA_8B["hidden_size"]))
    base = part.base(LLAMA_1B)
    is_small = session.is_dry_run
    work = work_of(LLAMA_1B, is_dry_run=is_small, batch=4)
    # Long enough for a save to end before the next one: 15 GB at 1 GB/s.
    every = 12 if is_small else 60
    name, copy = "asynchronous saves", "copy to the host"
    found = part.measure(name, _saves, base, session.scratch, work, every, True, limit=180)
    if figures := found.get(name):
        nbytes = int(figures["bytes"])
        copies = part.measure(copy, _copy_to_host, session.device, nbytes, limit=60)
        if seconds := copies.get(copy, {}).get("seconds"):
            part.add(name, {**figures, "stall_in_copies": figures["stall_seconds"] / seconds})
    small = work_of({**LLAMA_1B, "num_hidden_layers": 4}, is_dry_run=is_small, warm_up=0)
    part.measure("kill and resume", _kill_and_resume, base, session.scratch, small, limit=150)
    part.measure(
        "synchronous saves", _saves, base, session.scratch, work, min(every, 8), False, limit=120
    )


def _saves(base: Path, scratch: Path, work: Work, every: int, is_async: bool) -> Figures:
    """Train with two saves and one at the end; the figures are of the second one, which allocates nothing."""
    from tools.gpu.timed import CLOCK, peak_bytes

    directory = scratch / "saves"
    recipe = ours.merged(
        ours.recipe_of(work, base, directory),
        {
            "step_scheduler": {"max_steps": 2 * every + every // 2, "ckpt_every_steps": every},
            "checkpoint": {
                "enabled": True,
                "is_async": is_async,
                "keep_last": 1,
                "save_consolidated": False,
                "incremental": False,
            },
        },
    )
    CLOCK.start(1)
    code = ours.train(recipe, directory)
    if code != 0:
        raise RuntimeError(f"ckpt-train ended with {code}")
    saves = [
        line for line in log_lines(directory / "training.jsonl") if line.get("event") == "save"
    ]
    second = next(line for line in saves if line["step"] == 2 * every)
    figures = {
        "bytes": second["bytes"],
        "stall_seconds": second["stall_seconds"],
        "save_seconds": second["total_seconds"],
        "gb_per_second": second["bytes"] / 1e9 / second["total_seconds"],
        "peak_bytes": peak_bytes(),
        **_steps_beside(CLOCK.ends, every, 2 * every, second["total_seconds"]),
    }
    shutil.rmtree(directory)
    yield ("asynchronous saves" if is_async else "synchronous saves"), figures


def _steps_beside(
    ends: list[float], every: int, saved_step: int, save_seconds: float
) -> dict[str, float | None]:
    """How much longer steps take until a save is done than those before the first save. *ends* are times of steps.

    The time that is lost includes the stall, measured from outside: on a GPU the host runs ahead of the device, so that
    the interval in which the save begins says little.
    """
    before = [later - earlier for earlier, later in pairwise(ends[1 : every - 1])]
    usual = statistics.median(before)
    saved = ends[saved_step - 1]
    # Without the first one, which contains the stall.
    during = [end for end in ends[saved_step:] if end <= saved + save_seconds]
    result: dict[str, float | None] = {
        "usual_step_seconds": usual,
        "steps_while_saving": len(during),
        "step_while_saving": None,
        "lost_seconds": None,
    }
    if len(during) > 1:
        num_steps = len(during) - 1
        result["step_while_saving"] = (during[-1] - during[0]) / num_steps / usual
        result["lost_seconds"] = during[-1] - saved - len(during) * usual
    return result


def _copy_to_host(device: str, nbytes: int) -> Figures:
    """Seconds to copy *nbytes* from the device into pinned memory that is touched already, a gigabyte at a time."""
    import torch

    from tools.gpu.timed import synchronize

    is_cuda = device == "cuda"
    size = min(_CHUNK, nbytes)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
    target.copy_(source)
    synchronize()
    started = time.perf_counter()
    for begin in range(0, nbytes, size):
        part = min(size, nbytes - begin)
        target[:part].copy_(source[:part], non_blocking=True)
    synchronize()
    seconds = time.perf_counter() - started
    yield "copy to the host", {"seconds": seconds, "gb_per_second": nbytes / 1e9 / seconds}


def _kill_and_resume(base: Path, scratch: Path, work: Work) -> Figures:
    """Compare a run that is killed once and resumed with an undisturbed one, bit for bit, with ``deterministic``."""
    started = time.perf_counter()
    undisturbed, killed = scratch / "resume-undisturbed", scratch / "resume-killed"
    for directory, kill_after in ((undisturbed, None), (killed, _KILLED_AFTER), (killed, None)):
        _in_own_process(_recipe_to_resume(work, base, directory), directory, kill_after)
    num_steps = len(step_lines(undisturbed / "training.jsonl"))
    if num_steps != _KILL_STEPS:
        raise RuntimeError(f"the undisturbed run has {num_steps} steps")
    different = list(differences(undisturbed, killed))
    shutil.rmtree(undisturbed)
    shutil.rmtree(killed)
    print(*different, sep="\n")
    seconds = time.perf_counter() - started
    yield "kill and resume", {"is_equal": int(not different), "seconds": seconds}


def _recipe_to_resume(work: Work, base: Path, directory: Path) -> dict[str, Any]:
    """A recipe for a model with few layers: five checkpoints of 1B would not fit on the disk."""
    recipe = ours.recipe_of(work, base, directory)
    settings = dict(work.config)
    return ours.merged(
        recipe,
        {
            "model": {"from_pretrained": None, "from_config": settings},
            "deterministic": True,
            "step_scheduler": {"max_steps": _KILL_STEPS, "ckpt_every_steps": _KILLED_AFTER - 1},
            "checkpoint": {"enabled": True, "keep_last": 1, "save_consolidated": False},
        },
    )


def _in_own_process(recipe: dict[str, Any], directory: Path, kill_after: int | None) -> None:
    """Run a recipe in a forked process, which kills itself after a step if *kill_after* is given."""
    from tools.gpu.timed import CLOCK

    child = os.fork()
    if child == 0:
        code = 1
        try:
            CLOCK.start(0)
            CLOCK.kill_after_step = kill_after
            code = ours.train(recipe, directory)
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != (0 if kill_after is None else -9):
        raise RuntimeError(f"a run ended with {status}")
