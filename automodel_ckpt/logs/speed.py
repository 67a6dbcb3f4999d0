"""The speed of steps: what is computed of their times and tokens, and its report."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from automodel_ckpt.base.durable_io import replace_file
from automodel_ckpt.base.units import counted

log = logging.getLogger("automodel_ckpt")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of the run: its *number*, its *seconds* since the end of the step before, and its global batch.

    *data_seconds* are those of *seconds* in which rank 0 waited for the batch. *flops* are 0 if they are unknown.
    """

    number: int
    seconds: float
    data_seconds: float
    num_tokens: int
    flops: float


def speed_of(
    steps: Sequence[MeasuredStep], *, num_devices: int, device_rate: float | None
) -> dict[str, Any]:
    """The speed of *steps* on *num_devices* devices. *device_rate* is what the MFU is relative to, in FLOP/s.

    The values for floating-point operations are None if they are unknown.
    """
    each = [step.seconds for step in steps]
    seconds = sum(each)
    tokens_per_second = sum(step.num_tokens for step in steps) / seconds
    flops_per_device = sum(step.flops for step in steps) / seconds / num_devices
    return {
        "first_step": steps[0].number,
        "last_step": steps[-1].number,
        "num_steps": len(steps),
        "seconds": seconds,
        "seconds_per_step": {
            "mean": fmean(each),
            "median": median(each),
            "min": min(each),
            "max": max(each),
        },
        "data_seconds": sum(step.data_seconds for step in steps),
        "tokens": sum(step.num_tokens for step in steps),
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_device": tokens_per_second / num_devices,
        "tflops_per_device": flops_per_device / 1e12 if flops_per_device else None,
        "peak_tflops": device_rate / 1e12 if device_rate else None,
        "mfu": flops_per_device / device_rate if flops_per_device and device_rate else None,
    }


def speed_text(speed: dict[str, Any], *, num_devices: int, device_word: str) -> str:
    """Describe what :func:`speed_of` returned, as the progress line does. *device_word* is ``gpu`` or ``rank``."""
    times = speed["seconds_per_step"]
    of_all = f"{speed['tokens_per_second']:,.0f} tok/s"
    if num_devices > 1:
        of_all += f" ({speed['tokens_per_second_per_device']:,.0f}/{device_word})"
    spread = f"median {times['median']:.4g}, {times['min']:.4g} to {times['max']:.4g}"
    parts = [
        f"{counted(speed['num_steps'], 'step')} of {times['mean']:.4g} s ({spread})",
        of_all,
    ]
    if speed["mfu"] is not None:
        parts.append(f"MFU {speed['mfu']:.1%} of {speed['peak_tflops']:,.0f} TFLOP/s")
    parts.append(f"{speed['data_seconds'] / speed['seconds']:.1%} of the time waiting for data")
    return ", ".join(parts)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write the *report* as JSON. A failure is logged: the log has the report, and the run is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(report, indent=2).encode() + b"\n")
    except OSError as error:
        log.warning("throughput.file cannot be written: %s", error)
        return
    log.info("throughput: written to %s", path)
