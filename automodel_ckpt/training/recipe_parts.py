"""The parts of a run that a recipe builds: its data, its model, what updates it, and what saves and exports it.

:mod:`.model.trainable` builds a model, :mod:`.parts.objective` computes its loss, :mod:`.saves.saves` decides about
checkpoints, :mod:`.values.run_log` writes logs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedConfig

from automodel_ckpt.base.rng import StatefulRNG
from automodel_ckpt.base.store_url import public
from automodel_ckpt.base.units import counted
from automodel_ckpt.checkpoint import Checkpointer
from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.checkpoint.files.layout import AVERAGE
from automodel_ckpt.checkpoint.node_directories import not_without_storage
from automodel_ckpt.checkpoint.run.notes import forget_memory
from automodel_ckpt.checkpoint.saving.save import Assets
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig
from automodel_ckpt.config.recipe_rules import (
    Unsupported,
    harness_of,
    has_validation,
    unsupported_keys,
)
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.data.batches.loader import GlobalBatch, GlobalBatchLoader
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.loss.causal import LossFn
from automodel_ckpt.models.inspect.repository import base_directory, code_directory
from automodel_ckpt.models.meta_init import float32_kept
from automodel_ckpt.optim.build import build_schedule, check_scalable, check_schedule
from automodel_ckpt.optim.build import trainable as trained_parameters
from automodel_ckpt.parallel.mesh_sizes import RankLayout, choose_strategy, require_replicas
from automodel_ckpt.parallel.ranks.agree import gather_objects, raise_on_all_ranks
from automodel_ckpt.parallel.ranks.stop import StopRequest
from automodel_ckpt.training.counters.step_scheduler import StepScheduler, total_steps
from automodel_ckpt.training.gradients import check_part
from automodel_ckpt.training.measure.measurements import steps_per_epoch, stopping_rule
from automodel_ckpt.training.model.sections import (
    ModelRequest,
    data_sections,
    read_model_config,
    with_model_limits,
)
from automodel_ckpt.training.model.trainable import Trainable, build_trainable, check_before_data
from automodel_ckpt.training.parts.objective import Objective, build_loss_fn
from automodel_ckpt.training.parts.optimizers import build_optimizer, log_groups
from automodel_ckpt.training.parts.preprocessors import generation_file
from automodel_ckpt.training.saves.saves import Saves
from automodel_ckpt.training.values.run_log import RunLog

if TYPE_CHECKING:
    from automodel_ckpt.training.measure.weight_average import WeightAverage
    from automodel_ckpt.training.saves.memory_saves import MemorySaves
    from automodel_ckpt.training.watch.replicas import ReplicaCheck

log = logging.getLogger("automodel_ckpt")


class RecipeParts:
    """Builds the parts of a run. :class:`~automodel_ckpt.training.recipe.Recipe` adds the life of the run."""

    Config = RecipeConfig
    """The dataclass of the recipe file."""
    auto_class: ClassVar[Any]
    """The class of transformers that creates the model, by ``from_pretrained`` and ``from_config``."""
    task_type: ClassVar[str | None] = None
    """peft's name of the task. None when peft has no class of models for it."""
    section_key: ClassVar[str] = ""
    """The key of the section of the recipe's kind of training. Empty if there is none."""
    section_class: ClassVar[Any] = None
    """The dataclass of this section."""
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
    saves_class: type[Saves] = Saves
    """What saves and exports, and handles failed saves."""
    unsupported: ClassVar[Sequence[Unsupported]] = ()
    """The keys that the recipe does not support."""
    untracked: Collection[str] = ()
    """Names of attributes with state that is not saved. A class may set it, and so may :meth:`build`."""

    # Set by join_ranks.
    layout: RankLayout
    """The ranks of the run: their device mesh, this rank's device and position, and the process groups."""
    stop_request: StopRequest
    run_log: RunLog
    # Set by build.
    preprocessor: Any
    """The tokenizer or processor. Its files are part of exports. None when there is none."""
    model_config: PreTrainedConfig | None = None
    """The transformers configuration. None for a model by ``_target_``, and before :meth:`build_training` reads it."""
    dataloader: GlobalBatchLoader
    validation_batches: Callable[[], Iterator[GlobalBatch]] | None
    """Reads ``validation_dataset`` from its start. None when there is none."""
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
    """The section ``ema``. Its module is the attribute ``ema``, under which name checkpoints store it."""
    # Set by setup after build.
    stop_tokens: Sequence[int] = ()
    """The tokens that end generated text in addition to the base's end tokens: they end the answers of the data."""
    rng: StatefulRNG
    objective: Objective
    saves: Saves

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

    # ---------------------------------------------------------------- build

    def config_problems(self) -> list[Problem]:
        """List what the recipe does not support in its configuration. Extend it to check more than single keys."""
        return unsupported_keys(self.config, self.unsupported)

    def check_sections(self) -> None:
        """Raise one :class:`RecipeError` with all :meth:`config_problems`, if there are any.

        Called before the names in its sections are looked up on the Hub.
        """
        problems = self.config_problems()
        if problems:
            raise RecipeError.all_of(problems)

    def build(self) -> None:
        """Create the attributes that training needs, the same on all ranks. Each recipe defines it."""
        raise NotImplementedError

    def build_training(self) -> None:
        """Create the data, the model and what updates it from the recipe's sections.

        :attr:`preprocessor` exists already. The order determines which failure comes first: configuration and data are
        checked before weights are read.
        """
        config = self.config
        self.model_config = self.build_model_config()
        if not self.is_dry_run:
            check_before_data(_model_request(self))
        loaders: dict[str, GlobalBatchLoader] = {}
        for name, section in data_sections(config).items():
            if section is None:
                continue
            if has_validation(config):
                # The next messages name only the path of data, which sections can share.
                log.debug("reading the data of %s", name)
            loaders[name] = self.build_dataloader(section, validation=name != "dataset")
        self.dataloader = loaders.pop("dataset")
        main = loaders.pop("validation_dataset", None)
        self.validation_batches = None if main is None else partial(iter, main)
        self.validation_sets = {
            name.partition(".")[2]: partial(iter, loader) for name, loader in loaders.items()
        }
        per_epoch = steps_per_epoch(self.dataloader)
        self.step_scheduler = StepScheduler(
            config.step_scheduler,
            planned_steps=total_steps(config.step_scheduler, per_epoch),
            has_validation=has_validation(config),
            benchmark=harness_of(config),
            stopping_rule=stopping_rule(config),
        )
        planned_steps = self.step_scheduler.planned_steps
        self.trainable = self.build_trainable()
        self.model = self.trainable.model
        steps = "unknown steps" if planned_steps is None else counted(planned_steps, "step")
        steps += f" of {counted(config.step_scheduler.global_batch_size, self.sample_noun)}"
        if per_epoch is not None:
            steps += f", {per_epoch:,} in an epoch"
        log.info("%s; %s", self.trainable.summary, steps)
        log.info("precision: %s", self.trainable.precision)
        self.optimizer = self.build_optimizer()
        check_part(self, "build_optimizer", self.optimizer, Optimizer)
        self.lr_scheduler = self.build_lr_scheduler()
        if self.lr_scheduler is not None:
            check_part(self, "build_lr_scheduler", self.lr_scheduler, LRScheduler)
        self.loss_fn = self.build_loss_fn()

    # ---------------------------------------------------------------- the data

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

    def labels_in_words(self, micro_batch: Tensors) -> list[str]:
        """Describe the label of each sample of *micro_batch*, for ``--show-samples``. Empty if tokens have labels."""
        return []

    def samples_of_rows(self, micro_batch: Tensors) -> list[int]:
        """List the number of the sample, in *micro_batch*, of each of its rows, for ``--show-samples``."""
        return [row // self.rows_per_sample for row in range(len(micro_batch["input_ids"]))]

    # ---------------------------------------------------------------- the model and what updates it

    def build_model_config(self) -> PreTrainedConfig | None:
        """Read the transformers configuration of the model. Returns None for a model by ``_target_``.

        Extend it to change settings that the recipe's sections determine, such as the names of labels.
        """
        return read_model_config(
            self.config, self.layout, auto_class=self.auto_class, preprocessor=self.preprocessor
        )

    def build_trainable(
        self, config: RecipeConfig | None = None, *, is_trained: bool = True
    ) -> Trainable:
        """Build the model that a recipe's sections describe, by default the sections of this recipe. A collective.

        A recipe with several models calls it once for each. Only attributes of the recipe are saved, so assign the
        module of a :class:`Trainable` to an attribute if it has to be saved.
        """
        return build_trainable(_model_request(self, config, is_trained=is_trained))

    def build_optimizer(self) -> Optimizer:
        """Build the ``optimizer`` section over all parameters that need gradients."""
        layout = self.layout
        add_up: Callable[[list[int]], list[int]] = list
        if layout.in_stages:
            from automodel_ckpt.training.model import pipeline

            pipeline.check_no_idle_stages(trained_parameters([self.model]), layout)
            add_up = partial(pipeline.sum_over_stages, layout)
        optimizer, labels = build_optimizer(
            self.config.optimizer,
            self.model,
            add_up=add_up,
            takes_own_steps=self.takes_own_steps(),
            width_factor=self.width_factor(),
        )
        if layout.in_stages and not self.is_dry_run:
            pipeline.train_stages(optimizer, self.model, layout)
        log_groups(optimizer, labels)
        return optimizer

    def takes_own_steps(self) -> bool:
        """Whether other code than the loop's calls the optimizer."""
        return False

    def width_factor(self) -> float:
        """What the learning rates of matrices are multiplied by, for a recipe with learning rates by width."""
        return 1.0

    def build_lr_scheduler(self) -> LRScheduler | None:
        """Build the ``lr_scheduler`` section, by name over the planned steps. Returns None for a constant rate."""
        section = self.config.lr_scheduler
        if section is None:
            return None
        check_scalable(self.optimizer)
        if isinstance(section, Target):
            schedule: LRScheduler = build(section, optimizer=self.optimizer)
            check_schedule(schedule)
            return schedule
        settings = {key: value for key, value in vars(section).items() if key != "name"}
        planned = self.step_scheduler.planned_steps
        return build_schedule(self.optimizer, section.name, total_steps=planned, **settings)

    def build_loss_fn(self) -> LossFn:
        """Build the ``loss_fn`` section; cross-entropy without it."""
        return build_loss_fn(self.config.loss_fn, self.layout.device)

    # ---------------------------------------------------------------- the objective

    @property
    def section(self) -> Any:
        """The section of the recipe's kind of training, such as ``dpo``, or its defaults. None when there is none."""
        if not self.section_key:
            return None
        return getattr(self.config, self.section_key) or self.section_class()

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
            objective.limits = (self.model_config, self.step_scheduler)
        return objective

    def other_models(self) -> Sequence[nn.Module]:
        """List the models that are in memory in addition to the trained one, for the forecast of a dry run."""
        return ()

    # ---------------------------------------------------------------- what saves and exports

    def build_assets(self) -> dict[str, Assets]:
        """Describe what an export of ``model`` needs in addition to its weights. Empty for a model by ``_target_``."""
        assets = export_assets(self)
        if self.weight_average is not None and model_layout(self.config) != "shards":
            # The files of the average are a complete model, too.
            for model in list(assets.values()):
                assets[AVERAGE] = model
        return assets

    def export_files(self) -> Mapping[str, bytes]:
        """Describe the files of exports in addition to the files of transformers and peft: content by relative path."""
        return {}

    def build_saves(self) -> Saves:
        """Build the object that saves the state of the run."""
        return self.saves_class(self)


def _model_request(
    recipe: RecipeParts, config: RecipeConfig | None = None, *, is_trained: bool = True
) -> ModelRequest:
    """What :func:`build_trainable` gets from *recipe*."""
    dropout = recipe.config.dropout
    return ModelRequest(
        config or recipe.config,
        recipe.layout,
        recipe.auto_class,
        recipe.task_type,
        recipe.preprocessor,
        recipe.model_config if config is None else None,
        shares_rows=recipe.shares_rows,
        packs_images=recipe.packs_images,
        uses_dropout=recipe.uses_dropout if dropout == "auto" else dropout,
        is_trained=is_trained,
        is_dry_run=recipe.is_dry_run,
    )


_MAX_NAMED = 5
"""The largest number of ranks in a message."""


def validate_equal_lengths(name: str, num_samples: int | None, group: ProcessGroup | None) -> None:
    """Raise :class:`RecipeError` on all ranks if the data set of the section *name* has not *num_samples* on all.

    With different lengths, some ranks would wait in a step of the epoch that others do not have. A collective.
    """
    numbers = gather_objects(group, num_samples)
    different = []
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            different.append(f"{number} on rank {rank}")
    if different:
        raise RecipeError(
            "the ranks do not have the same data: their data sets are not equally long",
            where=name,
            value=f"{numbers[0]} samples on rank 0, {', '.join(different[:_MAX_NAMED])}",
        )


def model_layout(config: RecipeConfig) -> Literal["shards", "hf", "adapter"]:
    """``checkpoint.model_layout``; by default ``adapter`` for adapters in safetensors, otherwise ``shards``."""
    section = config.checkpoint
    if section.model_layout:
        return section.model_layout
    has_adapter_file = config.peft is not None and section.model_save_format == "safetensors"
    return "adapter" if has_adapter_file else "shards"


def export_assets(recipe: Any) -> dict[str, Assets]:
    """What an export of *recipe*'s module ``model`` needs besides its weights. Empty for a model by ``_target_``.

    Raises :class:`RecipeError` for what transformers could not write.
    """
    config: RecipeConfig = recipe.config
    trainable: Trainable = recipe.trainable
    further: Mapping[str, bytes] = recipe.export_files()
    section, peft = config.model, config.peft
    if isinstance(section, Target):
        return {}
    base = section.from_pretrained or (peft and peft.base_dir)
    base_dir = base_directory(base, section.revision) if base else None
    if recipe.stop_tokens:
        # The model has other end tokens than its base.
        further = {**generation_file(unwrap(trainable.model), base_dir), **further}
    if peft is not None:
        assert trainable.adapted is not None
        from automodel_ckpt.training.model.adapters import adapter_assets

        adapters = adapter_assets(
            trainable.model,
            trainable.adapted,
            section.from_pretrained or peft.base_dir or "",
            revision=section.revision,
            run=Path(config.checkpoint.checkpoint_dir),
            preprocessor=recipe.preprocessor,
            # The digest reads all bytes of the base, so only one rank computes it.
            reads_base=recipe.layout.is_rank0 and not recipe.is_dry_run,
            has_own_config=trainable.has_task_head,
            further=further,
        )
        return {"model": adapters}
    declared = (
        *section.allow_missing,
        *section.allow_unexpected,
        *trainable.resized,
        *trainable.other_head,
    )
    assets = HFAssets.from_model(
        trainable.model,
        tokenizer=recipe.preprocessor,
        base_dir=base_dir,
        code_dir=code_directory(unwrap(trainable.model), section.revision),
        declared=declared,
        further=further,
        float32_in=float32_kept(unwrap(trainable.model)),
    )
    # Now, not at the first export: transformers rejects an invalid generation config when it saves.
    assets.validate()
    return {"model": assets}


def check_export(config: RecipeConfig, assets: Mapping[str, Assets]) -> None:
    """Raise :class:`RecipeError` if the recipe wants exports or uploads and there are no *assets* to make them."""
    wanted = {
        "checkpoint.save_consolidated": config.checkpoint.save_consolidated,
        "checkpoint.export_best": config.checkpoint.export_best,
        "hub": config.hub is not None,
    }
    for key, value in wanted.items():
        if value and not assets:
            raise RecipeError(
                "there is nothing to export: only models of transformers have Hugging Face files",
                where=key,
                value=str(value).lower(),
                hint="remove the key; or give your recipe a build_assets method that describes the export",
            )


def check_without_shared_storage(config: RecipeConfig) -> None:
    """Check a recipe for nodes without shared storage: no node has all files of a checkpoint.

    Logs what is different by default. Raises :class:`RecipeError` for a key that needs all files on a node.
    """
    section = config.checkpoint
    unsupported: dict[str, Any] = {
        # hf is rejected by the checkpointer.
        "checkpoint.model_layout": section.model_layout == "adapter" and "adapter",
        "checkpoint.save_consolidated": section.save_consolidated,
        "checkpoint.export_best": section.export_best,
        "checkpoint.export_ema": section.export_ema,
        "checkpoint.average_last": section.average_last,
        "checkpoint.memory": section.memory is not None,
        "hub": config.hub is not None,
    }
    for key, value in unsupported.items():
        if value:
            raise not_without_storage(key, value)
    assert section.remote is not None, "the checkpoints are in a store"
    message = (
        "no Hugging Face files are exported: `ckpt pull %s DIRECTORY` downloads the newest checkpoint, "
        "and `ckpt export` makes them"
    )
    log.info(message, public(section.remote.url))
    if model_layout(config) == "adapter":
        log.info(
            "adapters are saved as shards, because ranks on several nodes cannot write one file"
        )


def check_uploads(config: RecipeConfig, group: dist.ProcessGroup | None = None) -> None:
    """Check the section ``hub`` on rank 0, without a request. Raises :class:`RecipeError` on all ranks."""
    section = config.hub
    with raise_on_all_ranks(group):
        if section is not None and (group is None or dist.get_rank(group) == 0):
            from automodel_ckpt.hub.background import check_hub

            check_hub(section)


def open_checkpointer(
    config: RecipeConfig, layout: RankLayout, resources: ExitStack
) -> Checkpointer:
    """Create the checkpointer of a run and take the lease of its directory. Collective.

    *resources* gets what closes it. Raises :class:`RecipeError` on all ranks if the directory cannot be used.
    """
    checkpointer = Checkpointer(
        config.checkpoint.checkpoint_dir,
        layout,
        layout.gloo_group,
        _options(config),
        timeout_seconds=_timeout_seconds(config),
        # The line about a published checkpoint is enough.
        is_quiet=True,
    )
    checkpointer.open()
    resources.callback(checkpointer.close)
    if checkpointer.is_rank0:
        checkpointer.run.remove_leftover_request()
    if checkpointer.nodes is not None:
        check_without_shared_storage(config)
    return checkpointer


def open_memory(
    config: RecipeConfig, layout: RankLayout, checkpointer: Checkpointer, resources: ExitStack
) -> MemorySaves | None:
    """Create what saves to memory, by the section ``checkpoint.memory``. Returns None without it. Collective.

    *checkpointer* writes to the run directory. *resources* gets what closes the result.
    """
    section = config.checkpoint.memory
    if section is None:
        forgetting = "removing the record of checkpoints in memory"
        checkpointer.call_on_rank0(forgetting, partial(forget_memory, checkpointer.directory))
        return None
    from automodel_ckpt.training.saves.memory_saves import MemorySaves

    memory = MemorySaves(
        section,
        _options(config),
        checkpointer,
        layout,
        layout.gloo_group,
        timeout_seconds=_timeout_seconds(config),
    )
    resources.callback(memory.close)
    return memory


def replica_check(
    config: RecipeConfig, layout: RankLayout, model: nn.Module
) -> ReplicaCheck | None:
    """Create what compares the replicas of *model* before each save.

    Returns None without ``checkpoint.verify_replicas``. Raises :class:`RecipeError` if the strategy has no replicas.
    """
    if not config.checkpoint.verify_replicas:
        return None
    strategy = choose_strategy(config.distributed.strategy, layout.sizes)
    from automodel_ckpt.training.watch.replicas import KEY, ReplicaCheck

    require_replicas(strategy, layout.sizes, KEY)
    return ReplicaCheck(model, layout, is_replicated=strategy == "ddp")


def _options(config: RecipeConfig) -> CheckpointConfig:
    """The section ``checkpoint`` with the layout of model files that null means for this recipe."""
    return replace(config.checkpoint, model_layout=model_layout(config))


def _timeout_seconds(config: RecipeConfig) -> float:
    return 60 * config.distributed.timeout_minutes
