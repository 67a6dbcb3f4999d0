"""What the sections of a recipe require of each other and of the recipe: relations, conditions, unsupported keys."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.keys.monitoring import EvaluationConfig, HarnessConfig
from automodel_ckpt.config.registry import is_own
from automodel_ckpt.config.schema_keys import is_changed
from automodel_ckpt.config.tree.rules import Condition, Relation, Target, asks, excludes, needs
from automodel_ckpt.errors import Problem

KIND_SECTIONS: dict[str, tuple[str, ...]] = {
    "classification": ("sequence_classification",),
    "kto": ("kto",),
    "reward_model": ("reward_model",),
    "distill": ("distill", "vlm_distill"),
    "pretrain": ("pretrain",),
    "dpo": ("dpo",),
    "orpo": ("orpo",),
    "embedding": ("embedding",),
    "reranker": ("reranker",),
}
"""Section -> the recipes of this package that read it. A recipe of a user may read any section."""


def has_validation(recipe: Any) -> bool:
    """Whether a recipe, or a namespace with its fields, has validation data."""
    return recipe.validation_dataset is not None or bool(recipe.validation_datasets)


def harness_of(recipe: Any) -> HarnessConfig | None:
    """The benchmark that a recipe, or a namespace with its fields, runs during training. None when there is none."""
    section = getattr(recipe, "evaluation", None)
    return None if section is None else section.harness


def has_benchmarks(recipe: Any) -> bool:
    """Whether a recipe, or a namespace with its fields, runs benchmarks during training.

    A section that is not valid counts: nothing else should be reported because of it.
    """
    section = getattr(recipe, "evaluation", None)
    is_invalid = section is not None and not isinstance(section, EvaluationConfig)
    return is_invalid or harness_of(recipe) is not None


def has_metrics(recipe: Any) -> bool:
    """Whether a recipe measures something in addition to the training loss."""
    return has_validation(recipe) or has_benchmarks(recipe)


def can_go_back(recipe: Any) -> bool:
    """Whether ``on_spike`` finds a checkpoint that is old enough, wherever the spike is between two saves.

    A spike that follows the newest checkpoint immediately needs the oldest one. With saves at intervals of time
    (``ckpt_every_minutes``) or of epochs, the number of steps between two saves is unknown before the run.
    """
    steps, checkpoint = recipe.step_scheduler, recipe.checkpoint
    numbers = [checkpoint.keep_last]
    if checkpoint.remote is not None:
        numbers.append(checkpoint.remote.keep_last)
    is_known = isinstance(steps.ckpt_every_steps, int) and None not in numbers
    if steps.on_spike is None or not is_known:
        return True
    longest: int = 1 + (max(numbers) - 1) * steps.ckpt_every_steps
    return bool(steps.on_spike.rollback <= longest)


_NOT_BOTH = """
packed_sequence | dataloader.collate_fn | remove one of them: packing requires the built-in collator
pretrain.z_loss | model.mtp | remove one of them
peft | model.freeze | remove model.freeze: peft freezes the base except for peft.modules_to_save and peft.bias;
  peft.exclude_modules keeps adapters out of parts of the model, such as '*vision_tower*'
peft | model.freeze_if_present | remove it: peft freezes the base except for peft.modules_to_save and peft.bias
qat | peft | remove one of the sections | an adapter is merged before the weights are rounded
fp8 | qat | remove one of the sections | both replace the products of linear layers
fp8 | distributed.tp_size | remove one of them, or shard the model with distributed.strategy fsdp2 alone
qat | distributed.tp_size | remove tp_size, and use fsdp2 | scales need complete rows of the weights
peft.target_parameters | distributed.ep_size | remove ep_size: fsdp2 shards experts with adapters
model.mtp | distributed.pp_size | remove pp_size (fsdp2 shards the model), or model.mtp | no stage has both the
  embeddings and the last hidden states
model.mtp | distributed.tp_size | remove tp_size (fsdp2 shards the model), or model.mtp | there is no plan for the
  layers of further tokens
peft.use_dora | distributed.tp_size | remove peft.use_dora, or remove tp_size and use fsdp2 | DoRA needs the norms of
  unsharded weights
peft.quantize_base | distributed.tp_size | remove peft.quantize_base, or remove tp_size
generation | distributed.pp_size | remove generation; ckpt generate completes prompts with a checkpoint
generation | distributed.cp_size | remove generation; ckpt generate completes prompts with a checkpoint
evaluation.harness | distributed.pp_size | remove the section evaluation; ckpt eval runs tasks on a checkpoint
evaluation.harness | distributed.cp_size | remove the section evaluation; ckpt eval runs tasks on a checkpoint
evaluation.harness | distributed.sequence_parallel | remove the section evaluation; ckpt eval runs tasks on a
  checkpoint
"""
"""Two keys that cannot be combined, what to do, and why. Lines that begin with two spaces continue the one before."""
_NEED_MODELS = """
fp8 | only models of transformers are converted | set model.from_pretrained or model.from_config
qat | only models of transformers are quantized | set model.from_pretrained or model.from_config
peft | adapters must reference a base model by name | set model.from_pretrained
"""
"""Sections that change models that this program builds, why, and what to do."""


def _cells(table: str) -> Iterator[list[str]]:
    for line in table.replace("\n  ", " ").strip().splitlines():
        yield [*line.split(" | "), ""]


def _pairs() -> Iterator[Relation]:
    """The relations in the tables above."""
    for first, second, hint, why, *_ in _cells(_NOT_BOTH):
        names = f"{first} and {second.removeprefix('distributed.')}"
        problem = f"{names} cannot be combined{f': {why}' if why else ''}"
        yield excludes(first, second, problem, hint)
    for section, why, hint, *_ in _cells(_NEED_MODELS):

        def has_model(recipe: Any, section: str = section) -> bool:
            return not asks(recipe, section) or isinstance(recipe.model, ModelConfig)

        problem = f"{section} cannot be used with model._target_: {why}"
        hint = f"{hint}, or remove the section {section}"
        yield Relation((section, "model"), has_model, problem, hint)


def has_separate_directory(recipe: Any) -> bool:
    """Whether checkpoints are written elsewhere than into the directory that the model is read from.

    A name of the Hub counts as a path: once the directory exists, the name means the directory.
    """
    base, run = getattr(recipe.model, "from_pretrained", None), recipe.checkpoint.checkpoint_dir
    # Other values than text are reported elsewhere.
    if not recipe.checkpoint.enabled or not isinstance(base, str) or not isinstance(run, str):
        return True
    return os.path.realpath(os.path.expanduser(base)) != os.path.realpath(os.path.expanduser(run))


def _kind_relations() -> tuple[Relation, ...]:
    """Restrict each section of :data:`KIND_SECTIONS` to its recipes."""
    relations = []
    for section, recipes in KIND_SECTIONS.items():
        names = " or ".join(recipes)

        def is_read(recipe: Any, section: str = section, names: tuple[str, ...] = recipes) -> bool:
            is_given = getattr(recipe, section) is not None
            return not is_given or recipe.recipe in names or not is_own(recipe.recipe)

        relations.append(
            Relation(
                (section,),
                is_read,
                f"only the recipe {names} reads the section {section}",
                f"set recipe: {recipes[0]}, or remove the section",
            )
        )
    return tuple(relations)


RELATIONS: tuple[Relation, ...] = (
    *_kind_relations(),
    *_pairs(),
    Relation(
        ("checkpoint.checkpoint_dir", "model.from_pretrained"),
        has_separate_directory,
        "checkpoints cannot be written into the directory of the model that training starts from",
        "set checkpoint.checkpoint_dir to another directory",
    ),
    Relation(
        ("step_scheduler.ckpt_on_best", "step_scheduler.val_every_steps"),
        lambda recipe: (
            has_validation(recipe)
            or not (
                recipe.step_scheduler.val_every_steps
                or (recipe.step_scheduler.ckpt_on_best and not has_benchmarks(recipe))
            )
        ),
        "ckpt_on_best and val_every_steps need a validation_dataset",
        "add a validation_dataset (or validation_datasets) section, or remove these keys",
    ),
    Relation(
        ("hub", "checkpoint.enabled"),
        lambda recipe: recipe.hub is None or recipe.checkpoint.enabled,
        "checkpoints are uploaded, and checkpoint.enabled is false",
        "enable checkpoints, or remove the section hub",
    ),
    Relation(
        ("hub.push", "validation_dataset"),
        lambda recipe: recipe.hub is None or recipe.hub.push != "best" or has_metrics(recipe),
        "without validation, no checkpoint is the best",
        "add a validation_dataset section, or set hub.push to final or every",
    ),
    Relation(
        ("generation", "validation_dataset"),
        lambda recipe: recipe.generation is None or has_validation(recipe),
        "completions are generated at validations, and there is no validation data",
        "add a validation_dataset section, or remove generation",
    ),
    Relation(
        ("checkpoint.keep_last", "step_scheduler.ckpt_every_steps", "step_scheduler.on_spike"),
        can_go_back,
        "the checkpoint to which on_spike.rollback goes back would be removed",
        "increase checkpoint.keep_last until (keep_last - 1) x ckpt_every_steps is at least rollback - 1, or decrease "
        "rollback",
    ),
    Relation(
        ("embedding.symmetric", "embedding.negatives"),
        lambda recipe: (
            recipe.embedding is None
            or not recipe.embedding.symmetric
            or recipe.embedding.negatives != "own"
        ),
        "embedding.symmetric and negatives: own cannot be combined: the documents of a pair have one query",
        "remove one of them",
    ),
    Relation(
        ("pretrain.base_width", "model", "peft"),
        lambda recipe: (
            recipe.pretrain is None
            or not recipe.pretrain.base_width
            or (getattr(recipe.model, "from_config", None) is not None and not recipe.peft)
        ),
        "pretrain.base_width scales initial values: it needs model.from_config, and no peft",
        "remove base_width, or train a model from its config",
    ),
    Relation(
        ("pretrain.split_documents", "packed_sequence"),
        lambda recipe: (
            recipe.pretrain is None
            or not recipe.pretrain.split_documents
            or recipe.packed_sequence is None
            or recipe.packed_sequence.size >= 2
        ),
        "rows that divide documents need at least two tokens",
        "increase packed_sequence.size",
    ),
    Relation(
        ("model.mtp.weights", "peft"),
        lambda recipe: (
            not asks(recipe, "model.mtp")
            or recipe.peft is None
            or (recipe.model.mtp.weights == "base" and recipe.model.from_config is None)
        ),
        "with peft, the layers of model.mtp are frozen, and random ones would never be trained",
        "train adapters on a base that has these layers, or remove model.mtp",
    ),
    Relation(
        ("checkpoint.model_layout", "peft"),
        lambda recipe: recipe.checkpoint.model_layout != ("hf" if recipe.peft else "adapter"),
        "model_layout adapter requires peft, and model_layout hf requires a run without peft",
        "remove model_layout, or set it to shards",
    ),
    Relation(
        ("peft.base_dir", "model.from_config"),
        lambda recipe: (
            recipe.peft is None
            or not isinstance(recipe.model, ModelConfig)
            or (recipe.peft.base_dir is None) == (recipe.model.from_config is None)
        ),
        "with peft, model.from_config and peft.base_dir must be set together",
        "set peft.base_dir to a directory for the new base, or use an existing base in model.from_pretrained",
    ),
)
CONDITIONS: tuple[Condition, ...] = (
    Condition(
        (
            "checkpoint.keep_best",
            "checkpoint.export_best",
            "checkpoint.best_metric_key",
            "checkpoint.best_mode",
            "step_scheduler.early_stopping",
        ),
        ("validation_dataset", "validation_datasets", "evaluation"),
        has_metrics,
        "nothing is measured without a validation_dataset",
        "add a validation_dataset section, or remove the key",
    ),
    Condition(
        ("ema.validate",),
        ("validation_dataset", "validation_datasets"),
        has_validation,
        "nothing is measured without validation data",
        "add a validation_dataset section, or remove the key",
    ),
    needs(
        "checkpoint.export_ema",
        "ema",
        "there is no average of the weights without the section ema",
        "add the section (ema: {decay: 0.999}), or remove the key",
    ),
    needs(
        "step_scheduler.on_spike",
        "checkpoint.enabled",
        "without checkpoints, a run cannot go back",
        "set checkpoint.enabled true, or remove on_spike",
    ),
    needs(
        "pretrain.split_documents pretrain.attend_across_documents",
        "packed_sequence",
        "without packed_sequence, no row has two documents",
        "add a packed_sequence section with the size of a row, or remove the key",
    ),
    Condition(
        ("dataloader.padding_free",),
        ("packed_sequence",),
        lambda recipe: recipe.packed_sequence is None,
        "packed_sequence always concatenates samples",
        "remove padding_free or packed_sequence",
    ),
)


def _changed_keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section and its subsections with values that differ from their defaults."""
    values = vars(section)
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, Target):
            yield from _changed_keys(value, f"{prefix}{name}.")
        elif is_changed(type(section), values, name):
            yield prefix + name


_FOR_CHECKPOINTS = (
    "checkpoint.",
    "logging.sample_ids",
    "step_scheduler.ckpt_",
    "step_scheduler.mtbf_hours",
)


def unused_without_checkpoints(recipe: Any) -> list[str]:
    """Changed keys that have no effect because ``checkpoint.enabled`` is false."""
    if recipe.checkpoint.enabled:
        return []
    return [
        key
        for key in _changed_keys(recipe)
        if key.startswith(_FOR_CHECKPOINTS) and key != "checkpoint.enabled"
    ]


@dataclass(frozen=True)
class Unsupported:
    """A key that a recipe does not support, and why. A key with a whole number as its value is supported up to 1."""

    key: str
    reason: str
    hint: str = ""
    """What to do instead; by default, to remove the key."""


def unsupported_keys(config: Any, table: Iterable[Unsupported]) -> list[Problem]:
    """Describe each key of *table* that is set in *config*."""
    problems = []
    for row in table:
        value: Any = config
        for name in row.key.split("."):
            value = getattr(value, name, None)
        if value is None or (isinstance(value, int) and value <= 1):
            continue
        what = f"the recipe {config.recipe} does not support {row.key}: {row.reason}"
        hint = row.hint or f"remove {row.key}"
        problems.append(Problem(what, row.key, _as_text(value), hint))
    return problems


def _as_text(value: Any) -> str:
    if isinstance(value, int | str):
        return str(value)
    return value._target_ if isinstance(value, Target) else "a section"


NEEDS_HEAD = Unsupported(
    "model._target_",
    "the head of the model depends on the recipe",
    "set model.from_pretrained or model.from_config",
)
NO_GENERATION = Unsupported(
    "generation",
    "a model with a classification head generates no text",
    "remove generation; name metrics of a validation_dataset instead",
)
WITH_HEAD = (
    NEEDS_HEAD,
    NO_GENERATION,
    Unsupported("packed_sequence", "a row has one label or score"),
    Unsupported("loss_fn", "the recipe's own section describes the loss"),
    Unsupported(
        "distributed.pp_size",
        "a model with a classification head cannot be divided into pipeline stages",
        "remove pp_size: fsdp2 shards the model over the same ranks",
    ),
    Unsupported(
        "distributed.cp_size",
        "the head needs complete rows, which context parallel ranks divide",
    ),
)
"""What recipes do not support that train a classification head instead of an output layer."""
