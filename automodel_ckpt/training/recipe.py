"""The base of all recipes: what :meth:`Recipe.setup` does in which order, how a run is resumed, and how it ends.

A rank starts first: the process groups, stop requests, the log, and what torch sets per process.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import yaml
from torch import nn
from torch.distributed import ProcessGroup

from automodel_ckpt.base.rng import StatefulRNG, seed_everything
from automodel_ckpt.base.version import __version__
from automodel_ckpt.checkpoint import Checkpointer, discover
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.layout import AVERAGE
from automodel_ckpt.checkpoint.files.type_aliases import TextDict, Values
from automodel_ckpt.checkpoint.parts.discovery import left_out
from automodel_ckpt.checkpoint.run.notes import DONE, STOPPED
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.recipe_rules import (
    has_metrics,
    has_validation,
    unused_without_checkpoints,
)
from automodel_ckpt.errors import CheckpointUnusable, RecipeError, Stopped
from automodel_ckpt.models.inspect.interface import listed
from automodel_ckpt.parallel.mesh import close_distributed, init_distributed
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.parallelize import check_parallelism
from automodel_ckpt.parallel.ranks import agree
from automodel_ckpt.parallel.ranks.agree import raise_on_all_ranks
from automodel_ckpt.parallel.ranks.stop import PeerStop, stop_request
from automodel_ckpt.training.gradients import BatchErrors
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.measure.measurements import (
    TRAIN_LOSS,
    measures_of,
    metric_names,
    validate_metric_keys,
)
from automodel_ckpt.training.model.sections import (
    compute_dtype,
    float32_precision,
    parallelism,
    resolve_precision,
    set_float32_precision,
)
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.parts.preprocessors import set_generation
from automodel_ckpt.training.recipe_parts import (
    RecipeParts,
    check_export,
    check_uploads,
    model_layout,
    open_checkpointer,
    open_memory,
    replica_check,
)
from automodel_ckpt.training.resume import (
    load_checkpoint,
    pin_base,
)
from automodel_ckpt.training.values.run_log import RunLog

log = logging.getLogger("automodel_ckpt")

_SHOWN = 5
"""The largest number of keys in a message."""


def validate_equal_on_all_ranks(config_yaml: str, group: ProcessGroup | None) -> None:
    """Raise :class:`RecipeError` on all ranks if one has another recipe than rank 0, or other versions. A collective.

    The values of ``${oc.env:NAME}`` may differ: *config_yaml* contains the text of the reference.
    """
    if agree.size(group) == 1:
        return
    # The text has references to environment variables, not their values, which may be secrets.
    mine = dict(_leaves({"versions": _versions(), **(yaml.safe_load(config_yaml) or {})}, ""))
    first = agree.broadcast_object(group, mine)
    different = [key for key in first | mine if str(first.get(key)) != str(mine.get(key))]
    problem = None
    if different:
        shown = different[:_SHOWN]
        problem = RecipeError(
            "this rank has another recipe, or other software, than rank 0",
            where=listed(different),
            value="; ".join(f"{key}: {mine.get(key)}, not {first.get(key)}" for key in shown),
            hint="give all machines the same recipe, overrides and versions; what has to differ can be written "
            "${oc.env:NAME}",
        )
    agree.all_or_nothing(group, problem)


def _versions() -> TextDict:
    # Without the build (+cu128): nodes with different hardware may need different builds.
    torch_version, _, _ = torch.__version__.partition("+")
    return {
        "automodel_ckpt": __version__,
        "torch": torch_version,
        "transformers": transformers.__version__,
    }


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


_PACKAGE = "automodel_ckpt."

_FORMER_METHODS = {
    "already_complete": "end",
    "build_benchmarks": "build_loop",
    "build_completions": "build_loop",
    "build_memory": "build_checkpointer",
    "build_replica_check": "build_saves",
    "build_step_scheduler": "build_training",
    "build_validation": "build_dataloader",
    "build_validation_sets": "build_dataloader",
    "check_benchmarks": "check_measurements",
    "check_metric_keys": "check_measurements",
    "finish_step": "step",
    "local_init_from": "fill_from_weights",
    "make_up_validation": "validate",
    "reference_name": "section",
    "reference_revision": "section",
    "set_generation": "build",
}
"""Methods of recipes and loops that earlier versions called, and what to override now."""


def check_classes(recipe: Any, base: Any) -> None:
    """Raise :class:`RecipeError` if *recipe* names a class of another kind than *base*, :class:`Recipe`, does.

    So is a method that nothing calls: one of earlier versions, and with a pipeline the loss or step of the recipe.
    """
    for owner in (type(recipe), recipe.loop_class):
        for name, present in _FORMER_METHODS.items():
            if hasattr(owner, name):
                raise RecipeError(
                    "a recipe overrides a method that is not called any more",
                    where=f"{owner.__name__}.{name}",
                    value=name,
                    hint=f"override {present} instead (docs/guides/write-a-recipe.md)",
                )
    own = []
    # What the recipes of this package add to an objective, the last stage applies.
    if not getattr(recipe.build_objective, "__module__", "").startswith(_PACKAGE):
        own.append(f"{type(recipe).__name__}.build_objective")
    for name, method in (
        ("loop_class", "train_step"),
        ("objective_class", "loss"),
        ("saves_class", ""),
    ):
        named, kind = getattr(recipe, name), getattr(base, name)
        if not isinstance(named, type) or not issubclass(named, kind):
            raise RecipeError(
                f"{name} of the recipe must be a subclass of {kind.__name__}",
                where=f"{type(recipe).__name__}.{name}",
                value=named,
            )
        if getattr(named, method, None) is not getattr(kind, method, None):
            own.append(f"{named.__name__}.{method}")
    if own and recipe.layout.in_stages:
        raise RecipeError(
            "a pipeline computes the loss stage by stage, and this recipe computes it in its own way",
            where="distributed.pp_size",
            value=own[0],
            hint="leave pp_size out; a recipe of yours can override Objective.row_loss, which the last stage calls",
        )


def check_model(recipe: Any) -> None:
    """Raise :class:`RecipeError` if ``build`` replaced ``model``, or created none: the loop trains the one of
    ``trainable``."""
    trainable = getattr(recipe, "trainable", None)
    if trainable is None or getattr(recipe, "model", None) is not trainable.model:
        raise RecipeError(
            "the recipe's build() has created no model, or model is not the one of trainable, which the loop trains",
            where=f"{type(recipe).__name__}.build",
            value=type(getattr(recipe, "model", None)).__name__,
            hint="call super().build() in it and then add your own attributes; to replace the model, extend "
            "build_trainable to return dataclasses.replace(trainable, model=...)",
        )


def check_hidden_methods(recipe: object) -> None:
    """Raise :class:`RecipeError` if ``build`` gave an attribute the name of a method.

    It would be called in the method's place, perhaps hours later.
    """
    kind = type(recipe)
    for name, value in vars(recipe).items():
        if callable(getattr(kind, name, None)) and not callable(value):
            raise RecipeError(
                "an attribute hides a method of the recipe",
                where=f"{kind.__name__}.build",
                value=name,
            )


def log_omitted_state(recipe: object, untracked: Collection[str]) -> None:
    """Log which attributes of *recipe* have state that is not saved, and why."""
    omitted = dict(left_out(recipe))
    for name, why in omitted.items():
        log.debug("not saved, since %s: %s", why, name)
    for name in sorted(set(untracked) - omitted.keys()):
        log.warning("untracked names %r, but the recipe has no such attribute", name)


def check_own(restore_from: str | None) -> None:
    """Raise :class:`CheckpointUnusable` if ``checkpoint.restore_from`` is a path with files of another program."""
    path = Path(restore_from or "").expanduser()
    is_ours = layout.parse_checkpoint_name(path.name) or os.path.lexists(path / layout.MANIFEST)
    if restore_from is None or "://" in restore_from or is_ours or not path.is_dir():
        return
    from automodel_ckpt.convert.formats.registry import detect

    known = detect(path)
    if known is not None:
        raise CheckpointUnusable(
            f"this is a checkpoint of another program: {known.name}",
            where="checkpoint.restore_from",
            value=str(path),
            hint="import it (`ckpt import DIRECTORY RUN`, with --training-state to continue its run), and name RUN in "
            "checkpoint.checkpoint_dir; or start from its weights with init_from.path",
        )


class Recipe(RecipeParts):
    """Builds the parts of a run and owns its state. A subclass defines what is trained on what.

    Every attribute with ``state_dict`` and ``load_state_dict`` is saved and restored, whatever its name, unless its
    name is in the set ``untracked``. To add your own, extend :meth:`build`.
    """

    loop_class: type[TrainingLoop] = TrainingLoop
    """What takes the steps, validates, and ends the run."""
    loop: TrainingLoop

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

    def takes_own_steps(self) -> bool:
        return self.loop_class.train_step is not TrainingLoop.train_step

    def build_loop(self) -> TrainingLoop:
        """Build the object that takes the steps. Give a loop of your own what else it needs by extending this."""
        return self.loop_class(self)

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
        dtype = compute_dtype(self.config.distributed) or next(self.model.parameters()).dtype
        self.run_log.measure_device(dtype)
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
        """Open the process groups and the log, and seed all ranks equally, so that they draw the same fresh weights.

        Collective. Raises :class:`RecipeError` on all ranks if their recipes differ.
        """
        config, section, resources = self.config, self.config.distributed, self._resources
        if config.logging.trackers:
            from automodel_ckpt.logs.trackers import require_trackers

            require_trackers(config.logging.trackers, has_logs=config.checkpoint.enabled)
        # Registered before the groups exist: init_distributed may fail after it has opened some.
        resources.callback(close_distributed)
        layout = init_distributed(
            backend=section.backend,
            timeout_minutes=section.timeout_minutes,
            **section.mesh_sizes,
        )
        # First: with another learning rate on one node, its shards would train apart silently.
        validate_equal_on_all_ranks(self.config_yaml, layout.gloo_group)
        self.stop_request = stop_request()
        if layout.world_size > 1:
            # torch has no public function for the default store.
            store = dist.distributed_c10d._get_default_store()
            resources.callback(PeerStop(self.stop_request, store).close)
        if not sys.stderr.isatty():
            # A file would get each state of a progress bar.
            transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.run_log = RunLog(config.logging, layout)
        resources.callback(self.run_log.close)
        if unused := unused_without_checkpoints(config):
            log.info(
                "nothing is saved, because checkpoint.enabled is false; no effect: %s",
                ", ".join(unused),
            )
        if config.deterministic:
            # cuBLAS reads it when it is initialized; without it, deterministic algorithms raise on GPUs.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.deterministic)
        device_type = layout.device.type
        set_float32_precision(float32_precision(config, device_type), device_type)
        seed_everything(config.seed)
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

    def modules_to_fill(self, state: Values) -> dict[str, nn.Module]:
        """Return the modules among the *state* of this recipe that ``init_from`` fills, by attribute name."""
        modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
        if self.weight_average is not None:
            del modules[AVERAGE]
        return modules
