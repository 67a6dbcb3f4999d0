"""Knowledge distillation: a student learns the distributions that a teacher predicts, and the labels.

The loss of a label is ``(1 - kd_ratio) * cross_entropy + kd_ratio * temperature**2 * divergence`` (section
``distill``). It is computed in chunks of positions (:mod:`automodel_ckpt.models.loss.fused_distillation`), so that
neither the student's nor the teacher's logits of a micro-batch are in memory at the same time. With ``top_k``, the
teacher's logits are computed before training and read from a cache, and later starts do not load the teacher.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from automodel_ckpt.base.units import counted
from automodel_ckpt.config.keys.kinds import DistillConfig
from automodel_ckpt.config.recipe_rules import Unsupported
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.collate import Tensors
from automodel_ckpt.data.mixture import for_each_source
from automodel_ckpt.data.samples.teacher_targets import (
    LOG_PROBS,
    REST,
    TOKENS,
    TargetCollator,
    TargetedDataset,
)
from automodel_ckpt.errors import Problem, RecipeError
from automodel_ckpt.loss.causal import labelled_positions
from automodel_ckpt.models.loss.distillation_targets import (
    DistillationWeights,
    TeacherTargets,
    TopTargets,
)
from automodel_ckpt.models.loss.fused_cross_entropy import TokenHits
from automodel_ckpt.models.loss.fused_distillation import Distillation
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.kinds.teacher import (
    Order,
    PretrainedTeacher,
    Teacher,
    check_vocabularies,
    find_teacher,
    identity_of,
    naming_the_teacher,
    offloads,
    teacher_config,
    with_numbered_labels,
)
from automodel_ckpt.training.kinds.teacher_cache import TeacherCaches, check_countable
from automodel_ckpt.training.parts.objective import Objective
from automodel_ckpt.training.recipe import Recipe
from automodel_ckpt.training.values.records import LossSum

log = logging.getLogger("automodel_ckpt")

_NOTE = "teacher"
"""The key of a checkpoint's notes about its environment."""


class DistillationObjective(Objective):
    """The cross-entropy and the divergence from the teacher, wherever there is a label."""

    sums_cross_entropy = False
    measures = ("kd_loss", "ce_loss", "accuracy")
    section: DistillConfig
    teacher: Teacher | None
    """None: the micro-batches have the teacher's most probable tokens."""
    num_columns: int | None
    """The number of tokens that are compared. None: all."""

    def loss(self, micro_batch: Tensors) -> LossSum:
        """Compute the loss of *micro_batch*, summed over its labels. The metrics are its two parts, unweighted."""
        cached = {name: micro_batch[name] for name in _CACHED if name in micro_batch}
        plain = {name: value for name, value in micro_batch.items() if name not in _CACHED}
        numbered, labels = with_numbered_labels(plain)
        rows = self.rows_of(numbered)
        positions, numbers = labelled_positions(rows["labels"])
        assert positions is not None
        order = numbers.numpy()
        targets = self._on_device(torch.from_numpy(labels[order]))
        hits = TokenHits(self.layout.device) if self.evaluation is not None else None
        head = self.trainable.loss_head
        assert head is not None
        with self._teacher_targets(cached, numbered, order) as of_teacher:
            criterion = Distillation(of_teacher, weights_of(self.section))
            loss_pass = head.computing_loss(
                self._on_device(positions), targets, hits=hits, criterion=criterion
            )
            inputs = self._inputs(rows, None)
            with self.trainable.compute(), loss_pass:
                output = self.model(**inputs, **self.trainable.forward_options)
                self._note_routing(output, rows, slice(None))
            result = self.with_aux_loss(loss_pass.loss_in(output))
        assert criterion.sums is not None
        metrics = {"ce_loss": criterion.sums[0], "kd_loss": criterion.sums[1]}
        if hits is not None:
            metrics["accuracy"] = hits.count
        return LossSum(result.loss, {**result.metrics, **metrics})

    @contextmanager
    def _teacher_targets(
        self, cached: Tensors, numbered: Tensors, order: Order
    ) -> Iterator[TeacherTargets]:
        """What the teacher predicts at the labels in *order*, inside the context: *cached*, or computed by it."""
        if self.teacher is not None:
            with self.teacher.predicting(numbered, order) as targets:
                yield targets
            return
        chosen = torch.from_numpy(order)
        tokens, log_probs, rest = (
            self._on_device(cached[name].index_select(0, chosen)) for name in _CACHED
        )
        yield TopTargets(tokens, log_probs, rest, self.num_columns)


_CACHED = (TOKENS, LOG_PROBS, REST)


class DistillationRecipe(Recipe):
    """What the distillations of all kinds of models share. As a base class, it precedes the class of a fine-tuning."""

    objective_class = DistillationObjective
    unsupported = (
        Unsupported(
            "distributed.pp_size",
            "the logits of teacher and student are compared on one rank, which has all stages",
            "remove pp_size; fsdp2 and tp_size share the models over ranks",
        ),
        Unsupported(
            "distributed.cp_size",
            "the logits of teacher and student are compared in complete rows",
            "remove cp_size; fsdp2 and tp_size share the models over ranks",
        ),
        Unsupported(
            "loss_fn",
            "the loss is the cross-entropy and a divergence",
            "remove loss_fn; distill.divergence and distill.kd_ratio choose the loss",
        ),
        Unsupported("model.mtp", "layers that predict further tokens are not trained"),
    )

    section_key, section_class = "distill", DistillConfig

    def config_problems(self) -> list[Problem]:
        problems = super().config_problems()
        if self.config.distill is None:
            hint = "add distill: {teacher: {from_pretrained: ...}}"
            problems.append(Problem("a distillation needs a teacher", "distill", "null", hint))
        return problems

    def build(self) -> None:
        """Create what a fine-tuning has, then the teacher, or the caches of its logits."""
        self._targeted: list[TargetedDataset] = []
        self._num_columns: int | None = None
        self._has_compared = False
        super().build()
        if self.trainable.loss_head is None and not self.is_dry_run:
            raise RecipeError(
                "the student has no single output layer, so its logits cannot be compared in chunks",
                where="model",
                value=type(self.model).__name__,
            )
        identity = identity_of(self.config)
        if self.checkpointer is not None:
            self.checkpointer.notes[_NOTE] = identity
        if self.section.top_k is None or self.is_dry_run:
            self._teacher: Teacher | None = self._build_teacher()
        else:
            self._read_or_compute(identity)
            # The caches replace it.
            self._teacher = None

    def build_dataset(self, section: Target) -> Any:
        """Build the data set that a section names. With ``top_k``, its samples have what the teacher predicts."""
        # Before the first data set is read, when both configurations are known.
        if not self._has_compared:
            self._has_compared = True
            teacher = find_teacher(self.config, self.auto_class)
            if teacher is not None:
                self.compare_with_teacher(teacher)
        dataset = super().build_dataset(section)
        if self.section.top_k is None:
            return dataset

        def with_targets(source: Any) -> TargetedDataset:
            check_countable(source)
            self._targeted.append(TargetedDataset(source))
            return self._targeted[-1]

        return for_each_source(dataset, with_targets)

    def compare_with_teacher(self, teacher: PretrainedTeacher) -> None:
        """Raise :class:`RecipeError` unless *teacher* can predict the tokens of the student."""
        if self.model_config is None:
            return
        self._num_columns = check_vocabularies(
            self.config,
            teacher,
            self.model_config,
            self.preprocessor,
            tp_size=self.layout.sizes.tp,
        )

    def build_collate_fn(self) -> Any:
        """Build the collate function of a fine-tuning. With ``top_k``, it collates what the teacher predicts too."""
        collate_fn = super().build_collate_fn()
        return collate_fn if self.section.top_k is None else TargetCollator(collate_fn)

    def build_objective(self) -> Objective:
        """Build the object that computes the loss of a micro-batch."""
        objective = super().build_objective()
        assert isinstance(objective, DistillationObjective)
        objective.teacher = self._teacher
        objective.num_columns = self._num_columns
        return objective

    def other_models(self) -> Sequence[nn.Module]:
        """List the teacher, unless its weights are elsewhere while the student trains."""
        is_elsewhere = self.section.top_k is not None or offloads(self.config, self.layout)
        if self._teacher is None or is_elsewhere:
            return ()
        return (self._teacher.trainable.model,)

    def resume(self) -> None:
        """Load the newest checkpoint, and report if it was trained with another teacher."""
        super().resume()
        resumed = self.saves.resumed
        if resumed is None:
            return
        saved, present = resumed.manifest.environment.get(_NOTE), identity_of(self.config)
        if isinstance(saved, str) and saved != present:
            log.warning(
                "the teacher is not the same as for %s: it is %s, and was %s",
                resumed.path.name,
                present,
                ascii(saved[:200]),
            )

    def _build_teacher(self) -> Teacher:
        with naming_the_teacher():
            trainable = self.build_trainable(
                teacher_config(self.config, self.layout), is_trained=False
            )
        log.info("teacher: %s; precision: %s", trainable.summary, trainable.precision)
        return Teacher(trainable, self.layout, self._num_columns)

    def _read_or_compute(self, identity: str) -> None:
        """Give each data set the cache of what the teacher predicts. The teacher is built if one has to be computed."""
        assert self.section.top_k is not None
        collate_fn = super().build_collate_fn()
        caches = TeacherCaches(
            self.layout,
            self.section,
            teacher=identity,
            num_columns=self._num_columns,
            batch_size=self.config.step_scheduler.local_batch_size,
            collate_fn=collate_fn,
        )
        missing = []
        for dataset in self._targeted:
            dataset.cache = caches.find(dataset)
            if dataset.cache is None:
                missing.append(dataset)
        if not missing:
            log.info(
                "the teacher is not loaded: its %s are cached", counted(self.section.top_k, "token")
            )
            return
        teacher = self._build_teacher()
        for number, dataset in enumerate(missing):
            # An earlier one may have the same samples.
            found = caches.find(dataset) if number else None
            dataset.cache = found if found is not None else caches.compute(dataset, teacher)


class Distill(DistillationRecipe, LLMFinetune):
    """Trains ``model`` to predict what the teacher of the section ``distill`` predicts on ``dataset``."""


def weights_of(section: DistillConfig) -> DistillationWeights:
    """The weights of the parts of the loss that a section asks for."""
    reverse = {"forward_kl": 0.0, "reverse_kl": 1.0, "mixed": section.reverse_weight}
    share = reverse[section.divergence]
    return DistillationWeights(section.kd_ratio, section.temperature, 1 - share, share)
