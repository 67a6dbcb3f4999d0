"""The base of all recipes: what :meth:`Recipe.setup` does in which order, how a run is resumed, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.checkpoint import Checkpointer, discover
from automodel_ckpt.checkpoint.files.layout import AVERAGE
from automodel_ckpt.checkpoint.run.notes import DONE, STOPPED
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.recipe_rules import has_metrics, has_validation
from automodel_ckpt.errors import Stopped
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.parallelize import check_parallelism
from automodel_ckpt.parallel.precision import resolve_precision
from automodel_ckpt.parallel.ranks.agree import raise_on_all_ranks
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.measure.measurements import (
    TRAIN_LOSS,
    measures_of,
    metric_names,
    validate_metric_keys,
)
from automodel_ckpt.training.model.sections import parallelism
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.recipe_parts import RecipeParts
from automodel_ckpt.training.saves.checkpointing import (
    check_export,
    check_uploads,
    model_layout,
    open_checkpointer,
    open_memory,
    replica_check,
)
from automodel_ckpt.training.start.base_commit import pin_base
from automodel_ckpt.training.start.resume import check_own, load_checkpoint, log_omitted_state
from automodel_ckpt.training.start.start_rank import (
    check_classes,
    check_hidden_methods,
    check_model,
    start_rank,
)
from automodel_ckpt.training.stop_tokens import set_generation
from automodel_ckpt.training.watch.batch_errors import BatchErrors

log = logging.getLogger("automodel_ckpt")


class Recipe(RecipeParts):
    """Builds the parts of a run and owns its state. A subclass defines what is trained on what.

    Every attribute with ``state_dict`` and ``load_state_dict`` is saved and restored, whatever its name, unless its
    name is in the set ``untracked``. To add your own, extend :meth:`build`.
    """

    def setup(self) -> None:
        """Join the ranks, build everything, and load the checkpoint to resume from.

        Mistakes in the recipe are raised as early as possible, most of them before the model's weights are read.
        """
        self.layout = self.join_ranks()
        check_classes(self, Recipe)
        self.config = resolve_precision(self.config, self.layout.sizes, self.layout.device.type)
        doing = "while the model and the optimizer were built and loaded"
        with BatchErrors(self.config, self.layout).out_of_memory(doing):
            self._build_and_resume()

    def _build_and_resume(self) -> None:
        check_parallelism(parallelism(self.config.distributed), self.layout)
        self.check_measurements()
        # It takes the lease: a second run of this directory fails before it reads data or weights.
        self.checkpointer = self.build_checkpointer()
        check_uploads(self.config, self.layout.gloo_group)
        self.check_sections()
        self.config = pin_base(self.config, self.checkpointer, self.layout.gloo_group)
        self.build()
        check_model(self)
        self.stop_tokens = set_generation(self)
        self.build_weight_average()
        compute_dtype = parallelism(self.config.distributed).compute_dtype
        self.run_log.measure_device(compute_dtype or next(self.model.parameters()).dtype)
        self.run_log.progress.total_steps = self.step_scheduler.planned_steps
        # Random numbers drawn above are the same on all ranks, so that fresh weights are. From here each data-parallel
        # rank has its own, and nothing is drawn before the first step. Tensor parallel ranks, which compute the same
        # values, continue to draw the same.
        self.rng = StatefulRNG(self.config.seed, self.layout.random_stream, self.layout.sizes.grid)
        if self.checkpointer is not None:
            # Only rank 0 reads the files of the base.
            with raise_on_all_ranks(self.layout.gloo_group):
                assets = self.build_assets()
            self.checkpointer.assets.update(assets)
            self.checkpointer.notes["precision"] = self.trainable.precision
            if self.memory is not None:
                self.memory.share_notes(self.checkpointer)
            check_export(self.config, self.checkpointer.assets)
        self.objective = self.build_objective()
        self.run_log.terms = self.objective.terms
        self.saves = self.build_saves()
        self.saves.replica_check = replica_check(self.config, self.layout, self.model)
        self.loop = self.build_loop()
        self.resume()

    def run(self) -> None:
        """Train until the end of the run. Raises :class:`Stopped` after a stop request. Call :meth:`setup` before."""
        stopped = None
        try:
            self.loop.run()
        except Stopped as error:
            stopped = error
        self.run_log.timeline.outcome = DONE if stopped is None else STOPPED
        if self.memory is not None:
            # The run has saved its last step on disk.
            self.memory.remove()
        if stopped is not None:
            raise stopped

    def close(self) -> None:
        """Close the logs, the checkpointer and the process groups; safe after a failed or missing ``setup``."""
        self._resources.close()

    def join_ranks(self) -> RankLayout:
        """Open the process groups and the log; seed all ranks equally, so that they draw the same fresh weights."""
        layout, self.stop_request, self.run_log = start_rank(
            self.config, self.config_yaml, self._resources
        )
        return layout

    def check_measurements(self) -> None:
        """Check the keys that name metrics, and find the tasks of ``evaluation.harness`` and read their data.

        A collective, before anything else is read. Raises :class:`RecipeError` for a metric that the run does not
        measure, if lm-evaluation-harness is not installed, or if it has no such tasks.
        """
        config, loop = self.config, self.loop_class
        extended = (
            loop.losses is not TrainingLoop.losses or loop.validate is not TrainingLoop.validate
        )
        # A loop that measures something else knows its names only when it has measured it.
        if has_metrics(config) and not extended:
            known = [TRAIN_LOSS]
            if has_validation(config):
                measures = measures_of(self.objective_class, config.loss_fn)
                known += metric_names(measures, config.validation_datasets)
            validate_metric_keys(config, known)
        section = config.evaluation
        if section is not None and section.harness is not None:
            from automodel_ckpt.training.measure.evaluated_model import find_tasks

            self.task_index = find_tasks(section.harness, self.layout.gloo_group)

    def build_weight_average(self) -> None:
        """Create the average of the section ``ema``, if there is one. A collective."""
        section = self.config.ema
        if section is None:
            return
        from automodel_ckpt.training.measure.weight_average import WeightAverage

        self.weight_average = WeightAverage(
            self.model,
            section,
            with_frozen=model_layout(self.config) != "shards",
            group=self.layout.gloo_group,
        )
        # Set only with the section: a recipe may use the name for something else.
        self.ema = self.weight_average.module

    def build_checkpointer(self) -> Checkpointer | None:
        """Build the ``checkpoint`` section and take the lease of its directory. Returns None when it is not enabled."""
        if not self.config.checkpoint.enabled:
            return None
        checkpointer = open_checkpointer(self.config, self.layout, self._resources)

        def close_log_files() -> None:
            lease_is_lost = checkpointer.run.is_lost
            checkpointer.wait()
            self.run_log.close_files(lease_is_lost=lease_is_lost)

        # Registered after it, and so called before it: the last log lines must be written while this run has the lease.
        self._resources.callback(close_log_files)
        self.memory = open_memory(self.config, self.layout, checkpointer, self._resources)
        return checkpointer

    # ---------------------------------------------------------------- resume

    def resume(self) -> None:
        """Load the newest usable checkpoint if there is one, otherwise the weights that ``init_from`` names.

        It is the end of :meth:`setup`: nothing may draw random numbers between it and the first step.
        """
        check_hidden_methods(self)
        state = discover(self)
        if self.checkpointer is not None:
            log_omitted_state(self, self.untracked)
            check_own(self.config.checkpoint.restore_from)
            load_checkpoint(self, state)
        if self.saves.resumed is None:
            self.fill_from_weights(self.modules_to_fill(state), self.trainable)
        if self.weight_average is not None:
            self.weight_average.start(self.saves.resumed)
        self.saves.start_hub_uploads(self._resources)

    def fill_from_weights(self, modules: Mapping[str, nn.Module], trainable: Trainable) -> None:
        """Fill *modules*, by attribute name, with the weights that ``init_from`` names, if it does. Collective.

        *trainable* describes the one with the name ``model``.
        """
        section, model, group = self.config.init_from, self.config.model, self.layout.gloo_group
        if not section:
            return
        from automodel_ckpt.training.parts.init_from import start_from

        start_from(
            section,
            modules,
            ranks=self.layout,
            group=group,
            resizable=trainable.resized,
            new_rows=model.new_tokens if isinstance(model, ModelConfig) else "mean",
            verify=self.config.checkpoint.verify,
        )

    def modules_to_fill(self, state: Mapping[str, Any]) -> dict[str, nn.Module]:
        """Return the modules among the *state* of this recipe that ``init_from`` fills, by attribute name."""
        modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
        if self.weight_average is not None:
            del modules[AVERAGE]
        return modules
