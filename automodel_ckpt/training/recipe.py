"""The base of all recipes: what :meth:`Recipe.setup` builds, in which order, and what is saved.

The parts are in separate modules: :mod:`.trainable` builds a model, :mod:`.objective` computes its loss,
:mod:`.loop` takes the steps, :mod:`.saves` decides about checkpoints, :mod:`.run_log` writes logs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint import Checkpointer, discover
from automodel_ckpt.checkpoint.files.layout import AVERAGE
from automodel_ckpt.checkpoint.run.timeline import DONE, STOPPED
from automodel_ckpt.checkpoint.saving.save import Assets
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.recipe_rules import has_metrics, has_validation
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.data.batches.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.errors import Problem, RecipeError, Stopped
from automodel_ckpt.loss.causal import LossFn
from automodel_ckpt.optim.build import trainable as trained_parameters
from automodel_ckpt.optim.lr import build_schedule, check_scalable, check_schedule
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.parallel.parallelize import check_parallelism
from automodel_ckpt.parallel.precision import resolve_precision
from automodel_ckpt.parallel.ranks.agree import gather_objects, raise_on_all_ranks
from automodel_ckpt.parallel.ranks.stop import StopRequest
from automodel_ckpt.training.counters.cadence import total_steps
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.loop import TrainingLoop
from automodel_ckpt.training.measure.validation_metrics import (
    TRAIN_LOSS,
    cadence_of,
    measures_of,
    metric_names,
    steps_per_epoch,
    validate_metric_keys,
)
from automodel_ckpt.training.model.sections import parallelism, read_model_config, with_model_limits
from automodel_ckpt.training.model.trainable import Trainable, build_trainable
from automodel_ckpt.training.parts.objective import ContextCheck, Objective, build_loss_fn
from automodel_ckpt.training.parts.optimizers import build_optimizer, log_groups
from automodel_ckpt.training.parts.parameter_groups import AddUp
from automodel_ckpt.training.saves.checkpointing import (
    check_export,
    check_uploads,
    export_assets,
    model_layout,
    open_checkpointer,
    open_memory,
    replica_check,
)
from automodel_ckpt.training.saves.saves import Saves
from automodel_ckpt.training.start.base_commit import pin_base
from automodel_ckpt.training.start.resume import check_own, load_checkpoint
from automodel_ckpt.training.start.resume_overrides import log_omitted_state
from automodel_ckpt.training.start.start_rank import (
    built,
    check_classes,
    check_hidden_methods,
    check_model,
    check_pipeline_extensions,
    start_rank,
    validate_equal_lengths,
)
from automodel_ckpt.training.stop_tokens import add_stop_tokens, use_chat_template
from automodel_ckpt.training.unsupported import Unsupported, unsupported_keys
from automodel_ckpt.training.values.run_log import RunLog
from automodel_ckpt.training.watch.batch_errors import Situation, reporting_out_of_memory

if TYPE_CHECKING:
    from automodel_ckpt.training.measure.evaluated_model import Completions, HarnessBenchmark
    from automodel_ckpt.training.measure.weight_average import WeightAverage
    from automodel_ckpt.training.saves.memory_saves import MemorySaves
    from automodel_ckpt.training.start.remote_weights import Section
    from automodel_ckpt.training.watch.replica_check import ReplicaCheck

log = logging.getLogger("automodel_ckpt")


class Recipe:
    """Builds the parts of a run and owns its state. A subclass defines what is trained on what.

    Every attribute with ``state_dict`` and ``load_state_dict`` is saved and restored, whatever its name, unless its
    name is in the set ``untracked``. To add your own, extend :meth:`build`.
    """

    Config = RecipeConfig
    """The dataclass of the recipe file."""
    auto_class: ClassVar[Any]
    """The class of transformers whose ``from_pretrained`` and ``from_config`` make the model."""
    task_type: ClassVar[str | None] = None
    """peft's name of the task; None if peft has no class of models for it."""
    shares_rows: ClassVar[bool] = False
    """Whether samples may share rows without padding, if the model supports it."""
    packs_images: ClassVar[bool] = False
    """Whether the samples of ``packed_sequence`` have images, which :attr:`preprocessor` prepares."""
    uses_dropout: ClassVar[bool] = True
    """Whether models are trained with their dropout, if the recipe file does not say."""
    sample_noun: ClassVar[str] = "sample"
    """What an item of the data set is, in the singular: logs and ``ckpt show`` count "pairs" for a "pair"."""
    rows_per_sample: ClassVar[int] = 1
    """Number of consecutive rows of a micro-batch that a sample becomes, for ``--show-samples``."""
    with_preceding: ClassVar[bool] = False
    """Whether the collator gets, before the samples of a micro-batch, the one before them in the global batch."""
    objective_class: type[Objective] = Objective
    """What computes the loss of a micro-batch."""
    loop_class: type[TrainingLoop] = TrainingLoop
    """What takes the steps, validates, and ends the run."""
    saves_class: type[Saves] = Saves
    """What saves and exports, and handles failed saves."""
    unsupported: ClassVar[Sequence[Unsupported]] = ()
    """The keys that the recipe does not support."""
    untracked: Collection[str] = ()
    """Names of attributes with state that is not saved; a class may set it, and so may :meth:`build`."""

    # Set by join_ranks.
    layout: RankLayout
    """The ranks of the run: their device mesh, this rank's device and position, and the process groups."""
    stop_request: StopRequest
    run_log: RunLog
    # Set by build.
    preprocessor: Any
    """The tokenizer or processor, whose files are part of exports; None if there is none."""
    model_config: PreTrainedConfig | None = None
    """The transformers configuration; None for a model by ``_target_``, and before :meth:`build_training` reads it."""
    dataloader: GlobalBatchLoader
    validation_batches: Callable[[], Iterator[GlobalBatch]] | None
    """Reads ``validation_dataset`` from its start; None if there is none."""
    validation_sets: Mapping[str, Callable[[], Iterator[GlobalBatch]]]
    """Read the sets of ``validation_datasets`` from their starts, by name."""
    step_scheduler: StepScheduler
    trainable: Trainable
    model: nn.Module
    """The model of :attr:`trainable`, under which name checkpoints store it."""
    optimizer: Optimizer
    lr_scheduler: LRScheduler | None
    loss_fn: LossFn
    """The loss of full logits, if the output layer does not compute it."""
    weight_average: WeightAverage | None = None
    """The section ``ema``; its module is the attribute ``ema``, under which name checkpoints store it."""
    # Set by setup after build.
    stop_tokens: Sequence[int] = ()
    """The tokens that end generated text beside those of the base: they end the answers of the data."""
    rng: StatefulRNG
    objective: Objective
    saves: Saves
    loop: TrainingLoop

    def __init__(self, config: RecipeConfig, *, config_yaml: str) -> None:
        """*config_yaml* is the text of the resolved recipe, which each checkpoint contains."""
        # With a URL as checkpoint_dir, everything below works in a local directory, from which it is uploaded.
        self.config = with_local_directory(config)
        self.config_yaml = config_yaml
        self.untracked: set[str] = set(self.untracked)
        self.checkpointer: Checkpointer | None = None
        self.memory: MemorySaves | None = None
        self.is_dry_run = False
        """Whether the model is only counted, for ``--dry-run``: its weights have no values."""
        self.origins: Mapping[str, str] = {}
        """Where each value of the recipe comes from, by dotted key; set by ``ckpt-train``."""
        self.overridden: Collection[str] = ()
        """The dotted keys that the command line gives; set by ``ckpt-train``."""
        # Closes in the reverse order; each resource is registered where it is opened.
        self._resources = ExitStack()

    # ---------------------------------------------------------------- the life of a run

    def setup(self) -> None:
        """Join the ranks, build everything, and load the checkpoint to resume from.

        Mistakes in the recipe are raised as early as possible, most of them before the model's weights are read.
        """
        check_classes(type(self), Recipe)
        self.layout = self.join_ranks()
        self.config = resolve_precision(self.config, self.layout.sizes, self.layout.device.type)
        doing = "while the model and the optimizer were built and loaded"
        with reporting_out_of_memory(doing, Situation(self.config, self.layout)):
            self._build_and_resume()

    def _build_and_resume(self) -> None:
        check_parallelism(parallelism(self.config.distributed), self.layout)
        if self.layout.in_stages:
            check_pipeline_extensions(self, Recipe)
        self.check_metric_keys()
        self.check_benchmarks()
        # It takes the lease: a second run of this directory fails before it reads data or weights.
        self.checkpointer = self.build_checkpointer()
        check_uploads(self.config, self.layout.gloo_group)
        self.check_sections()
        self.config = pin_base(self.config, self.checkpointer, self.layout.gloo_group)
        self.build()
        check_model(self)
        self.set_generation()
        self.build_weight_average()
        self.run_log.measure_device(self._compute_dtype())
        self.run_log.progress.total_steps = self.step_scheduler.planned_steps
        # Random numbers drawn above are the same on all ranks, so that fresh weights are. From here each data-parallel
        # rank has its own, and nothing is drawn before the first step. Tensor parallel ranks, which compute the same
        # values, continue to draw the same.
        self.rng = StatefulRNG(self.config.seed, self.layout.random_stream, self.layout.sizes.grid)
        if self.checkpointer is not None:
            self._describe_model(self.checkpointer)
        self.objective = self.build_objective()
        self.run_log.terms = self.objective.terms
        self.saves = self.build_saves()
        self.saves.replica_check = self.build_replica_check()
        self.loop = self.build_loop()
        self.resume()

    def _describe_model(self, checkpointer: Checkpointer) -> None:
        """Give *checkpointer* what checkpoints contain of the model beside its state: side files, and its precision."""
        # Only rank 0 reads the files of the base.
        with raise_on_all_ranks(self.layout.gloo_group):
            assets = self.build_assets()
        checkpointer.assets.update(assets)
        checkpointer.notes["precision"] = self.trainable.precision
        if self.memory is not None:
            self.memory.share_notes(checkpointer)
        check_export(self.config, checkpointer.assets)

    def run(self) -> None:
        """Train until the end of the run. Raises :class:`Stopped` after a stop request. Call :meth:`setup` before."""
        timeline = self.run_log.timeline
        try:
            self.loop.run()
        except Stopped:
            timeline.outcome = STOPPED
            self._remove_memory()
            raise
        timeline.outcome = DONE
        self._remove_memory()

    def _remove_memory(self) -> None:
        """Remove the memory checkpoints of a run that has saved its last step on disk."""
        if self.memory is not None:
            self.memory.remove()

    def close(self) -> None:
        """Close the logs, the checkpointer and the process groups; safe after a failed or missing ``setup``."""
        self._resources.close()

    def join_ranks(self) -> RankLayout:
        """Open the process groups and the log; seed all ranks equally, so that they draw the same fresh weights."""
        started = start_rank(self.config, self.config_yaml, self._resources)
        self.stop_request = started.stop_request
        self.run_log = started.run_log
        return started.layout

    # ---------------------------------------------------------------- checks before the build

    def config_problems(self) -> list[Problem]:
        """List what the recipe does not support in its configuration. Extend it to check more than single keys."""
        return unsupported_keys(self.config, self.unsupported)

    def check_config(self) -> None:
        """Raise one :class:`RecipeError` with all :meth:`config_problems`, if there are any."""
        problems = self.config_problems()
        if problems:
            raise RecipeError.all_of(problems)

    def check_sections(self) -> None:
        """Raise :class:`RecipeError` for sections that this kind of recipe does not have, and for other problems of
        its configuration.

        Called before the names in them are looked up on the Hub.
        """
        self.check_config()

    def check_metric_keys(self) -> None:
        """Raise :class:`RecipeError` for a key that names a metric which the run does not measure."""
        loop = self.loop_class
        extended = (
            loop.losses is not TrainingLoop.losses or loop.validate is not TrainingLoop.validate
        )
        # A loop that measures something else knows its names only when it has measured it.
        if extended or not has_metrics(self.config):
            return
        known = [TRAIN_LOSS]
        if has_validation(self.config):
            measures = measures_of(self.objective_class, self.config.loss_fn)
            known += metric_names(measures, self.config.validation_datasets)
        validate_metric_keys(self.config, known)

    def check_benchmarks(self) -> None:
        """Find the tasks of ``evaluation.harness`` and read their data, before anything else is read. A collective.

        Raises :class:`RecipeError` if lm-evaluation-harness is not installed, or has no such tasks.
        """
        section = self.config.evaluation
        if section is None or section.harness is None:
            return
        from automodel_ckpt.training.measure.evaluated_model import find_tasks

        self._task_index = find_tasks(section.harness, self.layout.gloo_group)

    # ---------------------------------------------------------------- build

    def build(self) -> None:
        """Create the attributes that training needs, the same on all ranks. Each recipe defines it."""
        raise NotImplementedError

    def build_training(self) -> None:
        """Create the data, the model and what updates it from the recipe's sections.

        :attr:`preprocessor` exists already. The order is that of their failures: configuration and data are checked
        before weights are read.
        """
        self.model_config = self.build_model_config()
        self._log_section("dataset")
        self.dataloader = self.build_dataloader(self.config.dataset)
        self.validation_batches = self.build_validation()
        self.validation_sets = self.build_validation_sets()
        self.step_scheduler = self.build_step_scheduler()
        self.trainable = self.build_trainable()
        self.model = self.trainable.model
        planned_steps = self.step_scheduler.planned_steps
        steps = "unknown steps" if planned_steps is None else counted(planned_steps, "step")
        log.info("%s; %s", self.trainable.summary, steps)
        log.info("precision: %s", self.trainable.precision)
        self.optimizer = built(self, "optimizer", self.build_optimizer(), Optimizer)
        schedule = self.build_lr_scheduler()
        if schedule is not None:
            schedule = built(self, "lr_scheduler", schedule, LRScheduler)
        self.lr_scheduler = schedule
        self.loss_fn = self.build_loss_fn()

    # ---------------------------------------------------------------- build the data

    def build_dataset(self, section: Target) -> Any:
        """Build the data set that a section names. Each recipe defines it."""
        raise NotImplementedError

    def build_collate_fn(self) -> Any:
        """Build the function from samples to a micro-batch. Each recipe defines it."""
        raise NotImplementedError

    def build_dataloader(self, section: Target, *, validation: bool = False) -> GlobalBatchLoader:
        """Build a loader of this rank's part of the global batches; for validation in order, without accumulation."""
        config, steps, layout = self.config.dataloader, self.config.step_scheduler, self.layout
        global_batch_size = steps.global_batch_size
        if validation:
            global_batch_size = self.validation_batch_size()
        loader = GlobalBatchLoader(
            self.build_dataset(self.with_limit(section)),
            global_batch_size=global_batch_size,
            local_batch_size=steps.local_batch_size,
            collate_fn=self.build_collate_fn(),
            dp_rank=layout.dp_rank,
            dp_size=layout.dp_size,
            seed=self.config.seed,
            shuffle=config.shuffle and not validation,
            drop_last=config.drop_last and not validation,
            num_workers=0 if validation else config.num_workers,
            with_preceding=self.with_preceding,
        )
        name = "validation_dataset" if validation else "dataset"
        validate_equal_lengths(name, loader.num_samples, layout.gloo_group)
        return loader

    def with_limit(self, section: Target) -> Target:
        """Return the section of a data set with the model's context and vocabulary where it asks for them."""
        return with_model_limits(section, self.model_config)

    def validation_batch_size(self) -> int:
        """Return the number of samples that all ranks together validate at a time."""
        steps, sizes = self.config.step_scheduler, self.layout.sizes
        if self.with_preceding:
            return steps.global_batch_size
        # As many micro-batches as pipeline stages keep all stages busy.
        return steps.local_batch_size * sizes.dp * sizes.pp

    def build_validation(self) -> Callable[[], Iterator[GlobalBatch]] | None:
        """Build a function that reads the validation set from its start; its position is not state of the run."""
        if self.config.validation_dataset is None:
            return None
        self._log_section("validation_dataset")
        return partial(iter, self.build_dataloader(self.config.validation_dataset, validation=True))

    def build_validation_sets(self) -> Mapping[str, Callable[[], Iterator[GlobalBatch]]]:
        """Build functions that read the sets of ``validation_datasets`` from their starts, by name."""
        sets = {}
        for name, section in self.config.validation_datasets.items():
            self._log_section(f"validation_datasets.{name}")
            loader = self.build_dataloader(section, validation=True)
            sets[name] = partial(iter, loader)
        return sets

    def _log_section(self, name: str) -> None:
        """Log which section the next messages are about: those of data name its path, which sections can share."""
        if has_validation(self.config):
            log.info("reading the data of %s", name)

    def build_step_scheduler(self) -> StepScheduler:
        """Build the counters, and plan the number of steps as far as it is known."""
        cadence = cadence_of(self.config)
        planned = total_steps(cadence, steps_per_epoch(self.dataloader))
        return StepScheduler(cadence, planned_steps=planned)

    # ---------------------------------------------------------------- build the model and what updates it

    def build_model_config(self) -> PreTrainedConfig | None:
        """Read the transformers configuration of the model; None for a model by ``_target_``.

        Extend it to change settings that the recipe's sections determine, such as the names of labels.
        """
        return read_model_config(
            self.config, self.layout, auto_class=self.auto_class, preprocessor=self.preprocessor
        )

    def build_trainable(
        self, config: RecipeConfig | None = None, *, is_trained: bool = True
    ) -> Trainable:
        """Build the model that a recipe's sections describe, by default those of this recipe. A collective.

        A recipe with several models calls it once for each. Only attributes of the recipe are saved, so assign the
        module of a :class:`Trainable` to an attribute if it has to be saved.
        """
        return build_trainable(
            config or self.config,
            self.layout,
            auto_class=self.auto_class,
            task_type=self.task_type,
            preprocessor=self.preprocessor,
            model_config=self.model_config if config is None else None,
            shares_rows=self.shares_rows,
            packs_images=self.packs_images,
            uses_dropout=self.uses_dropout
            if self.config.dropout == "auto"
            else self.config.dropout,
            is_trained=is_trained,
            is_dry_run=self.is_dry_run,
        )

    def build_optimizer(self) -> Optimizer:
        """Build the ``optimizer`` section over all parameters that need gradients."""
        layout = self.layout
        add_up: AddUp = list
        if layout.in_stages:
            from automodel_ckpt.training.model import pipeline

            pipeline.check_no_idle_stages(trained_parameters([self.model]), layout)
            add_up = partial(pipeline.sum_over_stages, layout)
        optimizer, labels = build_optimizer(
            self.config.optimizer,
            self.model,
            add_up=add_up,
            takes_own_steps=self.loop_class.train_step is not TrainingLoop.train_step,
            width_factor=self.width_factor(),
        )
        if layout.in_stages and not self.is_dry_run:
            pipeline.train_stages(optimizer, self.model, layout)
        log_groups(optimizer, labels)
        return optimizer

    def width_factor(self) -> float:
        """What the learning rates of matrices are multiplied by, for a recipe with learning rates by width."""
        return 1.0

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Build the ``lr_scheduler`` section, by name over the planned steps; None for a constant rate."""
        section = self.config.lr_scheduler
        if section is None:
            return None
        check_scalable(self.optimizer)
        if isinstance(section, Target):
            schedule: LRScheduler = build(section, optimizer=self.optimizer)
            check_schedule(schedule)
            return schedule
        return build_schedule(
            self.optimizer,
            section.name,
            total_steps=self.step_scheduler.planned_steps,
            warmup_steps=section.warmup_steps,
            warmup_ratio=section.warmup_ratio,
            warmup_from=section.warmup_from,
            decay_steps=section.decay_steps,
            kwargs=section.kwargs,
        )

    def build_loss_fn(self) -> LossFn:
        """Build the ``loss_fn`` section; cross-entropy without it."""
        return build_loss_fn(self.config.loss_fn, self.layout.device)

    def _compute_dtype(self) -> torch.dtype:
        """The dtype of the matrix products of training."""
        dtype = parallelism(self.config.distributed).compute_dtype
        return dtype or next(self.model.parameters()).dtype

    def set_generation(self) -> None:
        """Let text that the model generates have the chat template of the data, and end where its answers do."""
        preprocessor, loader = (
            getattr(self, "preprocessor", None),
            getattr(self, "dataloader", None),
        )
        section = self.config.dataset
        use_chat_template(section, preprocessor)
        if loader is not None:
            model = unwrap(self.model)
            self.stop_tokens = add_stop_tokens(section, loader.dataset, preprocessor, model)

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

    # ---------------------------------------------------------------- build what saves and exports

    def build_checkpointer(self) -> Checkpointer | None:
        """Build the ``checkpoint`` section and take the lease of its directory; None if it is not enabled."""
        if not self.config.checkpoint.enabled:
            return None
        checkpointer = open_checkpointer(self.config, self.layout, self._resources)
        # Registered after it, and so called before it: the last log lines must be written while this run has the lease.
        self._resources.callback(self._close_log_files, checkpointer)
        self.memory = self.build_memory(checkpointer)
        return checkpointer

    def _close_log_files(self, checkpointer: Checkpointer) -> None:
        lease_is_lost = checkpointer.lease_is_lost
        checkpointer.wait()
        self.run_log.close_files(lease_is_lost=lease_is_lost)

    def build_memory(self, checkpointer: Checkpointer) -> MemorySaves | None:
        """Build the section ``checkpoint.memory``; None without it. *checkpointer* is that of the run directory."""
        return open_memory(self.config, self.layout, checkpointer, self._resources)

    def build_replica_check(self) -> ReplicaCheck | None:
        """Build what compares the replicas of the model before each save; None without ``checkpoint.verify_replicas``.

        Raises :class:`RecipeError` if the strategy has no replicas.
        """
        return replica_check(self.config, self.layout, self.model)

    def build_assets(self) -> dict[str, Assets]:
        """Describe what an export of ``model`` needs beside its weights; empty for a model by ``_target_``."""
        assets = export_assets(self)
        if self.weight_average is not None and model_layout(self.config) != "shards":
            # The files of the average are a complete model, too.
            for model in list(assets.values()):
                assets[AVERAGE] = model
        return assets

    def export_files(self) -> Mapping[str, bytes]:
        """Describe the files that exports have beside those of transformers and peft: content by relative path."""
        return {}

    def build_saves(self) -> Saves:
        """Build the object that saves the state of the run."""
        return self.saves_class(
            self.config,
            self.checkpointer,
            self.step_scheduler,
            self.run_log,
            partial(discover, self),
            config_yaml=self.config_yaml,
            num_ranks=self.layout.world_size,
            sample_noun=self.sample_noun,
            gather=partial(gather_objects, self.layout.gloo_group),
        )

    # ---------------------------------------------------------------- build the objective and the loop

    @property
    def section(self) -> Any:
        """The section of the recipe's kind of training, such as ``dpo``, for its objective; None if there is none."""
        return None

    def build_objective(self) -> Objective:
        """Build the object that computes the loss of a micro-batch."""
        objective = self.objective_class(
            self.trainable,
            self.layout,
            self.loss_fn,
            sequence_parallel=self.config.distributed.sequence_parallel,
            section=self.section,
        )
        if self.model_config is not None:
            objective.check_length = ContextCheck(self.model_config, self.step_scheduler)
        return objective

    def build_loop(self) -> TrainingLoop:
        """Build the object that takes the steps. Give a loop of your own what else it needs by extending this."""
        return self.loop_class(self)

    def build_completions(self) -> Completions | None:
        """Build the ``generation`` section; None without it."""
        section = self.config.generation
        if section is None:
            return None
        from automodel_ckpt.training.measure.evaluated_model import Completions

        return Completions(section, self)

    def build_benchmarks(self) -> list[HarnessBenchmark]:
        """Build what the section ``evaluation`` runs."""
        section = self.config.evaluation
        if section is None or section.harness is None:
            return []
        from automodel_ckpt.training.measure.evaluated_model import HarnessBenchmark

        return [HarnessBenchmark(section.harness, self._task_index, self)]

    # ---------------------------------------------------------------- what --show-samples and --dry-run ask

    def labels_in_words(self, micro_batch: Mapping[str, torch.Tensor]) -> list[str]:
        """Describe the label of each sample of *micro_batch*, for ``--show-samples``; empty if tokens have labels."""
        return []

    def samples_of_rows(self, micro_batch: Mapping[str, torch.Tensor]) -> list[int]:
        """List the number of the sample, in *micro_batch*, of each of its rows, for ``--show-samples``."""
        return [row // self.rows_per_sample for row in range(len(micro_batch["input_ids"]))]

    def other_models(self) -> Sequence[nn.Module]:
        """List the models that are in memory beside the trained one, for the forecast of a dry run."""
        return ()

    # ---------------------------------------------------------------- resume

    def resume(self) -> None:
        """Load the newest usable checkpoint if there is one, otherwise the weights that ``init_from`` names.

        It is the end of :meth:`setup`: nothing may draw random numbers between it and the first step.
        """
        check_hidden_methods(self)
        state = discover(self)
        if self.checkpointer is not None:
            self._load_checkpoint(self.checkpointer, state)
        self._start_from_weights(state)
        if self.weight_average is not None:
            self.weight_average.start(self.saves.resumed)
        self.saves.start_hub_uploads(self._resources)

    def _load_checkpoint(self, checkpointer: Checkpointer, state: Mapping[str, Any]) -> None:
        log_omitted_state(self, self.untracked)
        check_own(self.config.checkpoint.restore_from)
        load_checkpoint(self, state)

    def _start_from_weights(self, state: Mapping[str, Any]) -> None:
        """Load the weights that ``init_from`` names, unless the run continues."""
        if self.saves.resumed is None:
            self.fill_from_weights(self.modules_to_fill(state), self.trainable)

    def fill_from_weights(self, modules: Mapping[str, nn.Module], trainable: Trainable) -> None:
        """Fill *modules*, by attribute name, with the weights that ``init_from`` names, if it does. Collective.

        *trainable* describes the one with the name ``model``.
        """
        section, model = self.config.init_from, self.config.model
        if not section:
            return
        with self.local_init_from(section) as local_section:
            from automodel_ckpt.training.parts.init_from import start_from

            start_from(
                local_section,
                modules,
                ranks=self.layout,
                group=self.layout.gloo_group,
                resizable=trainable.resized,
                new_rows=model.new_tokens if isinstance(model, ModelConfig) else "mean",
                verify=self.config.checkpoint.verify,
            )

    def local_init_from(self, section: Section) -> AbstractContextManager[Section]:
        """Return a context manager for the section ``init_from`` with paths in place of URLs. Collective."""
        from automodel_ckpt.training.start.remote_weights import with_local_weights

        return with_local_weights(
            section,
            self.config.checkpoint,
            downloads=self._downloads,
            group=self.layout.gloo_group,
        )

    @property
    def _downloads(self) -> bool:
        """Whether this rank downloads to the run directory, also for other ranks."""
        if self.checkpointer is None:
            return self.layout.is_rank0
        return self.checkpointer.leads_node

    def modules_to_fill(self, state: Mapping[str, Any]) -> dict[str, nn.Module]:
        """Return the modules among the *state* of this recipe that ``init_from`` fills, by attribute name."""
        modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
        if self.weight_average is not None:
            del modules[AVERAGE]
        return modules
