"""The speed of training, which is reported when a run ends (section ``throughput``)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from automodel_ckpt.base.units import counted, size_text
from automodel_ckpt.checkpoint.run.timeline import DATA, STEPS
from automodel_ckpt.checkpoint.saving.environment import environment
from automodel_ckpt.config.keys.monitoring import ThroughputConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import Stopped
from automodel_ckpt.logs.speed import MeasuredStep, speed_of, speed_text, write_report
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.training.values.readback import LaunchedStep, Mark
from automodel_ckpt.training.values.run_log import RunLog

log = logging.getLogger("automodel_ckpt")


class Throughput:
    """Measures the steps of this process after ``throughput.warmup_steps``, on rank 0: all ranks step together.

    A step lasts from the end of the step before until its own end, both on the device. What the host does between
    steps, such as validations and saves, does not count. Waiting for data does.
    """

    def __init__(self, config: RecipeConfig, layout: RankLayout, run_log: RunLog) -> None:
        self._config, self._layout, self._run_log = config, layout, run_log
        self._section = config.throughput or ThroughputConfig()
        self._num_steps = 0
        self._end: Mark | None = None
        """The end of the newest step."""
        self._seconds_between = 0.0
        self._data_seconds = 0.0
        self._measured: list[MeasuredStep] = []

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report the speed of the steps in this context at its end, also after a stop request."""
        try:
            yield
        except Stopped:
            self._report()
            raise
        self._report()

    def note(self, step: LaunchedStep) -> None:
        """Add a *step* whose numbers were read, so that the device has done it."""
        timeline = self._run_log.timeline
        seconds_between = timeline.seconds_outside((STEPS, DATA))
        data_seconds = timeline.seconds_in((DATA,))
        end = step.numbers.end
        if self._end is None:
            seconds = end.seconds_since(step.start)
        else:
            seconds = end.seconds_since(self._end) - (seconds_between - self._seconds_between)
        self._num_steps += 1
        if self._num_steps > self._section.warmup_steps:
            measured = MeasuredStep(
                step.position.step,
                seconds,
                data_seconds - self._data_seconds,
                step.control.num_tokens,
                step.control.flops,
            )
            self._measured.append(measured)
        self._end = end
        self._seconds_between, self._data_seconds = seconds_between, data_seconds

    def _report(self) -> None:
        section = self._section
        if not self._measured:
            log.info(
                "throughput: not measured: %s in this start, and throughput.warmup_steps is %d",
                counted(self._num_steps, "step"),
                section.warmup_steps,
            )
            return
        num_devices = self._layout.world_size
        speed = speed_of(
            self._measured, num_devices=num_devices, device_rate=self._run_log.device_rate
        )
        memory = self._run_log.peak_memory
        log.info(
            "throughput: %s, peak memory %s",
            speed_text(speed, num_devices=num_devices, device_word=self._run_log.device_word),
            size_text(memory),
        )
        report = {**speed, "peak_memory_bytes": memory, **self._setting(section.warmup_steps)}
        self._run_log.log_event({"event": "throughput", "step": speed["last_step"], **report})
        if section.file is not None:
            write_report(Path(section.file).expanduser(), report)

    def _setting(self, warmup_steps: int) -> dict[str, Any]:
        """What was measured, and with which software."""
        device = self._layout.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        steps, found = self._config.step_scheduler, environment()
        return {
            "warmup_steps": warmup_steps,
            "global_batch_size": steps.global_batch_size,
            "local_batch_size": steps.local_batch_size,
            "num_devices": self._layout.world_size,
            "device": name,
            "python": found["python"],
            "packages": found["packages"],
        }
