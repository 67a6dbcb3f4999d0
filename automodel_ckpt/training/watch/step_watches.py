"""The watches over the steps of a run: hanging steps, and ranks that are slower than others (section ``hangs``), and a
GPU that waits for the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.ranks.stop import StopRequest
from automodel_ckpt.training.values.run_log import RunLog
from automodel_ckpt.training.values.step_exchange import StepExchange
from automodel_ckpt.training.watch.host_limit import HostLimit
from automodel_ckpt.training.watch.step_times import StepTimes, configuration_of

if TYPE_CHECKING:
    from automodel_ckpt.training.watch.hang_watch import HangWatch
    from automodel_ckpt.training.watch.stragglers import StragglerWatch


class StepWatches:
    """Reports steps that do not end, and slow ranks, while :meth:`watching` is entered."""

    def __init__(
        self,
        config: RecipeConfig,
        layout: RankLayout,
        checkpointer: Checkpointer | None,
        run_log: RunLog,
        exchange: StepExchange,
        stop_request: StopRequest | None = None,
    ) -> None:
        """*exchange* compares the times of all ranks. A *stop_request* waits for the present step."""
        self._stop_request = stop_request
        self._config = config
        self._layout = layout
        self._checkpointer = checkpointer
        self._run_log = run_log
        self._exchange = exchange
        self.host_limit = HostLimit(config, layout)
        self._hangs: HangWatch | None = None
        self._stragglers: StragglerWatch | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps within the context. Nothing is watched with one rank or without a run directory.

        Entering it is a collective.
        """
        settings = self._config.hangs
        if settings is None or self._checkpointer is None or self._layout.world_size == 1:
            yield
            return
        run = self._checkpointer.directory
        timeline = self._run_log.timeline
        from automodel_ckpt.checkpoint.memory.hang_reports import ARRIVAL_SECONDS
        from automodel_ckpt.training.watch.hang_watch import HangWatch

        watch = HangWatch(
            settings,
            self._layout,
            timeline,
            run,
            self._step_times(),
            timeout_seconds=60 * self._config.distributed.timeout_minutes,
            arrival_seconds=ARRIVAL_SECONDS if self._checkpointer.is_distributed else 0.0,
            stop_request=self._stop_request,
        )
        with watch as self._hangs:
            from automodel_ckpt.training.watch.stragglers import StragglerWatch

            self._stragglers = StragglerWatch(
                settings, self._layout, timeline, self._hangs.hosts, self._run_log.log_event
            )
            self._exchange.straggler_watch = self._stragglers
            yield

    def note_step(self, step: int) -> None:
        """Note that this rank has queued the work of *step*."""
        if self._hangs is not None:
            self._hangs.note_step(step)
        if self._stragglers is not None:
            self._stragglers.note_step()

    def _step_times(self) -> StepTimes:
        configuration = configuration_of(self._config, self._layout.world_size)
        return StepTimes(configuration, compiles=self._config.compile.enabled)
