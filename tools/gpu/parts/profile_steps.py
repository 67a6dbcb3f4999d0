"""Where the time of a step goes: kernels of 5 steps of LoRA 8B, full 8B and full 1B, with traces for a browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.gpu import ours
from tools.gpu.session import Figures, PartRun
from tools.gpu.shapes import LLAMA_1B, LLAMA_8B, Work, work_of
from tools.gpu.steps import base_of

_NUM_STEPS = 5
_WARM_UP = 3
_NUM_KERNELS = 25
_MOST_TRACE_BYTES = 15 << 20
"""A larger file does not come back from the device machine."""


def run(part: PartRun) -> None:
    """The profiler slows the steps, so that nothing here is a speed."""
    session = part.session
    cases: tuple[tuple[str, Mapping[str, Any], int, Mapping[str, Any]], ...] = (
        ("full 8B, compiled", LLAMA_8B, 1, ours.compiled(session.device)),
        ("LoRA 8B", LLAMA_8B, 2, ours.LORA),
        ("full 1B", LLAMA_1B, 2, {}),
    )
    for name, config, batch, section in cases:
        base = base_of(part, config)
        if base is None:
            continue
        work = work_of(config, is_dry_run=session.is_dry_run, batch=batch, warm_up=_WARM_UP)
        directory = session.scratch / "profile"
        recipe = ours.merged(ours.recipe_of(work, base, directory), section)
        recipe["step_scheduler"]["max_steps"] = _WARM_UP + _NUM_STEPS
        trace = session.out / f"trace-{name.replace(',', '').replace(' ', '-')}.json.gz"
        part.measure(name, _profiled, name, recipe, directory, str(trace), work, limit=120)


def _profiled(
    name: str, recipe: Mapping[str, Any], directory: Any, trace: str, work: Work
) -> Figures:
    """Train with torch's profiler around the last steps, and sum up the time of each kernel."""
    import os

    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    from tools.gpu.timed import CLOCK

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=_WARM_UP - 1, warmup=1, active=_NUM_STEPS)
    profiler = profile(activities=activities, schedule=plan)
    CLOCK.start(_WARM_UP)
    CLOCK.on_step = profiler.step
    with profiler:
        code = ours.train(recipe, directory)
    if code != 0:
        raise RuntimeError(f"ckpt-train ended with {code}")
    yield name, {"seconds_per_step": CLOCK.figures()["seconds_per_step"]}
    for number, (kernel, seconds, calls) in enumerate(_kernels(profiler)):
        yield f"{name}, kernel {number + 1}", {"name": kernel, "ms": seconds, "calls": calls}
    profiler.export_chrome_trace(trace)
    if os.path.getsize(trace) > _MOST_TRACE_BYTES:
        os.remove(trace)
        raise RuntimeError(f"the trace is larger than {_MOST_TRACE_BYTES} bytes, and was removed")


def _kernels(profiler: Any) -> list[tuple[str, float, float]]:
    """(name, milliseconds per step, calls per step) of the kernels that take most time; of operators on a CPU."""
    events = profiler.key_averages()
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    found = []
    for event in kernels or events:
        # Steps are events of the device, too.
        if event.key.startswith("ProfilerStep"):
            continue
        microseconds = getattr(event, "self_device_time_total", 0) or event.self_cpu_time_total
        milliseconds = microseconds / 1000 / _NUM_STEPS
        num_calls = event.count / _NUM_STEPS
        found.append((event.key[:120], milliseconds, num_calls))
    longest_first = sorted(found, key=lambda kernel: -kernel[1])
    return longest_first[:_NUM_KERNELS]
