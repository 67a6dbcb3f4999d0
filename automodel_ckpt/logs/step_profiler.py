"""A trace of a few training steps with torch's profiler, written as a Chrome trace and a table."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

log = logging.getLogger("automodel_ckpt")

_TABLE_ROWS = 40


class StepProfiler(AbstractContextManager["StepProfiler"]):
    """Traces the steps that *settings* select, in the context in which all steps are made.

    *settings* is the section ``profile``. Its steps count from 1, and are steps of this process.

    Files: ``step_N_rank_R.json.gz`` in *directory*, where N is the first traced step of the run, and a table of the
    slowest operations with the suffix ``.txt``. A run that ends earlier writes the steps that were traced. A failed
    write is logged, and training continues.
    """

    def __init__(self, settings: Any, directory: Path, rank: int, device: torch.device) -> None:
        self._settings = settings
        self._directory, self._rank, self._device = directory, rank, device
        self._num_steps = 0
        self._traced: list[int] = []
        self._profiler: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The context of one training step, which is step *number* of the run."""
        settings = self._settings
        self._num_steps += 1
        if self._num_steps == settings.start_step - settings.warmup_steps:
            self._start()
        if self._profiler is None:
            yield
            return
        if self._num_steps >= settings.start_step:
            self._traced.append(number)
        with record_function(f"step {number}"):
            yield
        # It calls _write after the last traced step.
        self._profiler.step()
        if len(self._traced) == settings.num_steps:
            self._stop()

    def __exit__(self, error_type: object, *_: object) -> None:
        """End a trace that is in progress, and write the steps that it has."""
        if self._profiler is not None:
            try:
                self._stop()
            except RuntimeError:
                # A device that failed cannot be traced: the error that ends the run is the one to report.
                if error_type is None:
                    raise
        if self._num_steps < self._settings.start_step:
            log.info(
                "no step was profiled: %d were made, and profile.start_step is %d",
                self._num_steps,
                self._settings.start_step,
            )

    def _start(self) -> None:
        settings = self._settings
        # Otherwise torch's profiler prints a line of its library for each start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
            schedule=schedule(
                wait=0, warmup=settings.warmup_steps, active=settings.num_steps, repeat=1
            ),
            on_trace_ready=self._write,
            record_shapes=settings.record_shapes,
            with_stack=settings.with_stack,
            profile_memory=settings.memory,
            # There is one cycle. Without this, torch 2.11 warns on each rank that those before it are discarded.
            acc_events=True,
        )
        profiler.start()
        # Only now: torch crashes if it stops a profiler that has not started.
        self._profiler = profiler

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()

    def _write(self, profiler: profile) -> None:
        """Write the trace and the table. A failure is logged: a trace is not worth a run."""
        if not self._traced:
            return
        path = self._directory / f"step_{self._traced[0]}_rank_{self._rank}.json.gz"
        table = path.with_name(path.name.removesuffix(".json.gz") + ".txt")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # Renamed when it is complete: a killed process leaves no truncated trace under the name.
            partial = path.with_name(f".{os.getpid()}-{path.name}")
            profiler.export_chrome_trace(str(partial))
            partial.replace(path)
            column = (
                "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
            )
            table.write_text(profiler.key_averages().table(sort_by=column, row_limit=_TABLE_ROWS))
        except (OSError, RuntimeError) as error:
            log.warning("the profile of %s cannot be written: %s", _steps(self._traced), error)
            return
        log.info(
            "profile of %s: %s (open it in https://ui.perfetto.dev) and %s",
            _steps(self._traced),
            path,
            table.name,
        )


def _steps(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    return f"steps {numbers[0]} to {numbers[-1]}"
