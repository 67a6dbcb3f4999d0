"""The teacher of a distillation: a second model that is not trained, and what it predicts for a micro-batch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer, PreTrainedConfig

from automodel_ckpt.base.device_copies import to_device
from automodel_ckpt.config.keys.kinds import DistillConfig, TeacherConfig
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.data.collate import IGNORE_INDEX, Tensors
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.loss.causal import in_numpy, labelled_positions
from automodel_ckpt.models.config_reading import check_task, load_model_config
from automodel_ckpt.models.inspect.interface import logits_of, wanted_size
from automodel_ckpt.models.inspect.repository import RepositoryOptions, base_directory
from automodel_ckpt.models.loss.distillation_targets import LogitTargets
from automodel_ckpt.models.loss.fused_distillation import CapturedHidden
from automodel_ckpt.parallel.mesh_sizes import RankLayout, choose_strategy
from automodel_ckpt.parallel.parallelize import gather_root, reshard
from automodel_ckpt.training.model.sections import (
    is_fully_sharded,
    naming_keys,
    repository_options,
    text_tokenizer,
)
from automodel_ckpt.training.model.trainable import Trainable
from automodel_ckpt.training.parts.objective import model_inputs

Order = np.ndarray[Any, Any]
"""Numbers of labels, int64 [N]."""
KEY = "distill.teacher"
_SAME_FAMILY = (
    "use a teacher of the student's family, with the same tokenizer and the same settings of images: both models get "
    "the same tokens and pixels, and vocabularies may differ only by padding, without distributed.tp_size"
)
_SAMPLE_BYTES = 2**20
"""Bytes at the beginning and at the end of a file of weights that its digest is computed from."""


# ---------------------------------------------------------------- before weights are read


def teacher_config(config: RecipeConfig, layout: RankLayout) -> RecipeConfig:
    """Return a recipe with the teacher of *config* as its ``model``, for ``build_trainable``.

    Raises :class:`RecipeError` if the teacher cannot be offloaded.
    """
    distributed = config.distributed
    if offloads(config, layout):
        if not is_fully_sharded(config, layout):
            raise RecipeError(
                "a teacher can be offloaded only with fsdp2, which moves one layer at a time",
                where="distill.offload_teacher",
                value=f"strategy {choose_strategy(distributed.strategy, layout.sizes)}",
                hint="set distributed.strategy: fsdp2, or remove offload_teacher",
            )
        distributed = replace(distributed, cpu_offload=True)
    return replace(config, model=teacher_model(config), peft=None, distributed=distributed)


def teacher_model(config: RecipeConfig) -> ModelConfig | Target:
    """Return the teacher of *config* as a section ``model``."""
    section = (config.distill or DistillConfig()).teacher
    if not isinstance(section, TeacherConfig):
        return section
    return ModelConfig(
        from_pretrained=section.from_pretrained,
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
        dtype=section.dtype,
        attn_implementation=section.attn_implementation,
    )


def offloads(config: RecipeConfig, layout: RankLayout) -> bool:
    """Whether the weights of the teacher are in the host's memory while the student trains."""
    section = config.distill
    return section is not None and section.offload_teacher and layout.device.type != "cpu"


@dataclass(frozen=True)
class PretrainedTeacher:
    """A teacher by name, before its weights are read."""

    name: str
    """Its directory or Hub name."""
    repository: RepositoryOptions
    config: PreTrainedConfig


def find_teacher(config: RecipeConfig, auto_class: Any) -> PretrainedTeacher | None:
    """Read the configuration of the teacher. Returns None for a teacher by ``_target_``.

    Raises :class:`RecipeError` if *auto_class* of transformers does not support the model.
    """
    model = teacher_model(config)
    if not isinstance(model, ModelConfig):
        return None
    assert model.from_pretrained is not None
    with naming_the_teacher():
        options = repository_options(model)
        found = load_model_config(
            from_pretrained=model.from_pretrained, repository=options, auto_class=auto_class
        )
        check_task(found, auto_class)
    return PretrainedTeacher(model.from_pretrained, options, found)


def check_vocabularies(
    config: RecipeConfig,
    teacher: PretrainedTeacher,
    student: PreTrainedConfig,
    tokenizer: Any,
    *,
    tp_size: int,
) -> int | None:
    """Compare the vocabularies of teacher and student. Returns how many of their first tokens are compared.

    None means all tokens. Vocabularies of different sizes (padding) are accepted if the tokenizers are equal.
    Raises :class:`RecipeError` for other vocabularies.
    """
    options, of_teacher = teacher.repository, None
    tokenizer = text_tokenizer(tokenizer)
    read: Any = AutoTokenizer.from_pretrained
    # Whatever it raises for a directory without a tokenizer: without one, the sizes are compared.
    with suppress(Exception):
        of_teacher = read(
            str(Path(teacher.name).expanduser()),
            revision=options.revision,
            trust_remote_code=options.runs_code,
        )
    if of_teacher is not None and tokenizer is not None:
        _require_equal(tokenizer, of_teacher, teacher.name)
    asked = config.model.vocab_size if isinstance(config.model, ModelConfig) else None
    student_size = wanted_size(asked, tokenizer) or _vocab_size(student)
    teacher_size = _vocab_size(teacher.config)
    if student_size == teacher_size:
        return None
    shared = min(student_size, teacher_size)
    sizes = f"{teacher_size} tokens; the student has {student_size}"
    is_padded = of_teacher is not None and tokenizer is not None and len(tokenizer) <= shared
    if not is_padded or tp_size > 1:
        raise RecipeError(
            "the teacher has another vocabulary than the student",
            where=f"{KEY}.from_pretrained",
            value=f"{teacher.name}: {sizes}",
            hint=_SAME_FAMILY,
        )
    return shared


def _vocab_size(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().vocab_size)


def _require_equal(student: Any, teacher: Any, name: str) -> None:
    of_student, of_teacher = student.get_vocab(), teacher.get_vocab()
    if of_student == of_teacher:
        return
    differing = sum(of_teacher.get(token) != number for token, number in of_student.items())
    raise RecipeError(
        "the teacher has another tokenizer than the student",
        where=f"{KEY}.from_pretrained",
        value=f"{name}: {len(of_teacher)} tokens, the student has {len(of_student)}, of which {differing} have another "
        "id or none in the teacher",
        hint=_SAME_FAMILY,
    )


def naming_the_teacher() -> AbstractContextManager[None]:
    """Let errors about the section ``model`` name ``distill.teacher``: it is built as a model of the recipe."""

    def rename(where: str) -> str:
        if where == "model" or where.startswith("model."):
            return KEY + where.removeprefix("model")
        return where

    return naming_keys(rename)


def identity_of(config: RecipeConfig) -> str:
    """Describe the teacher in one line that changes with it: its name, and a digest of its files or else its revision.

    The digest covers names, sizes, and the beginning and the end of each file with weights, so it is cheap. A teacher
    by ``_target_`` is described by its section.
    """
    section = (config.distill or DistillConfig()).teacher
    if not isinstance(section, TeacherConfig):
        return f"{section._target_} {sorted(section.kwargs.items())}"
    name = section.from_pretrained
    directory = None
    with suppress(OSError, ValueError):
        directory = base_directory(name, section.revision)
    if directory is None:
        return f"{name} revision {section.revision} digest unknown"
    # Without the revision: the same files on another branch are the same teacher.
    return f"{name} digest {_digest_of(directory)}"


def _digest_of(directory: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".safetensors", ".bin") and path.name != "config.json":
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


# ---------------------------------------------------------------- predictions


def with_numbered_labels(
    micro_batch: Tensors,
) -> tuple[dict[str, Tensor], np.ndarray[Any, Any]]:
    """Replace the labels of *micro_batch* by their numbers 0 to N - 1, sample by sample. Returns them with it.

    Models lay out samples in rows differently: the numbers show which label a position of a row has. The first token of
    a row predicts nothing and gets -100.
    """
    labels = in_numpy(micro_batch["labels"])
    is_label = labels != IGNORE_INDEX
    is_label[:, 0] = False
    numbers = np.full_like(labels, IGNORE_INDEX)
    numbers[is_label] = np.arange(np.count_nonzero(is_label))
    return {**micro_batch, "labels": torch.from_numpy(numbers)}, labels[is_label]


class Teacher:
    """Computes what a model that is not trained predicts at the labels of a micro-batch."""

    def __init__(self, trainable: Trainable, layout: RankLayout, num_columns: int | None) -> None:
        """*num_columns* is the number of tokens that are compared. None: all."""
        self.trainable = trainable
        self.num_columns = num_columns
        self._layout = layout

    @contextmanager
    def predicting(self, numbered: Tensors, order: Order | None) -> Iterator[LogitTargets]:
        """Run the teacher on a micro-batch of :func:`with_numbered_labels`. Its logits are available in the context.

        *order* are the numbers of the labels [N] in the order in which they are compared. None: 0 to N - 1. A
        collective of the ranks that share the model, and so is the end of the context.
        """
        try:
            targets = self._run(numbered, order)
            head: Any = self.trainable.loss_head
            if head is not None:
                # fsdp2 has freed the parameters of the output layer after the forward pass.
                gather_root(self.trainable.model)
                if isinstance(head, FSDPModule):
                    head.unshard()
            yield targets
        finally:
            reshard(self.trainable.model)

    def _run(self, numbered: Tensors, order: Order | None) -> LogitTargets:
        trainable = self.trainable
        layout = trainable.row_layout
        rows = numbered if layout is None else layout(numbered)
        found, numbers = labelled_positions(rows["labels"])
        assert found is not None
        # The position of label number i comes to place i, then they are put in the order of the student.
        by_number = in_numpy(found)[np.argsort(in_numpy(numbers), kind="stable")]
        wanted = by_number if order is None else by_number[order]
        device = self._layout.device
        positions = to_device(torch.from_numpy(np.ascontiguousarray(wanted)), device)
        inputs = model_inputs(rows, device)
        head = trainable.loss_head
        with torch.no_grad():
            if head is None:
                output = logits_of(trainable.forward(inputs))
                logits = output.flatten(0, 1).index_select(0, positions)
                return LogitTargets(lambda start, end: logits[start:end].clone(), self.num_columns)
            captured = CapturedHidden()
            with head.computing_loss(positions, positions, criterion=captured):
                trainable.forward(inputs)
        hidden = captured.hidden
        assert hidden is not None
        return LogitTargets(
            lambda start, end: head.logits_of(hidden[start:end]), self.num_columns, captured.part
        )


log = logging.getLogger("automodel_ckpt")

_TOKENS = (
    "image_token_id",
    "image_start_token_id",
    "image_end_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "boi_token_id",
    "eoi_token_id",
    "audio_token_id",
    "mm_tokens_per_image",
    "scale_factor",
    "spatial_merge_size",
    "downsample_ratio",
    "vision_feature_select_strategy",
    "image_grid_pinpoints",
)
"""Settings of models with which the tokens of an image change."""
_VISION = (
    "image_size",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "pooling_kernel_size",
    "num_channels",
    "in_channels",
)
"""Settings of vision towers with which the shape of the pixels or the number of their patches changes."""
_PIXELS = (
    "model_input_names",
    "patch_size",
    "temporal_patch_size",
    "merge_size",
    "do_rescale",
    "rescale_factor",
    "do_normalize",
    "image_mean",
    "image_std",
)
"""Settings of image processors with which the same image has other tensors. Limits of its size are none of them."""

_AUDIO = ("model_input_names", "sampling_rate", "feature_size", "hop_length", "n_fft", "n_samples")
"""Settings of feature extractors with which the same audio has other tensors."""


def check_images(
    teacher: PretrainedTeacher, student: PreTrainedConfig | None, processor: Any
) -> None:
    """Raise :class:`RecipeError` if *teacher* expects other images than *processor* makes for the *student*.

    Only the processor is compared for a student by ``_target_``, which has no configuration.
    """
    from automodel_ckpt.data.media.media_files import audio_processor_of
    from automodel_ckpt.models.processor import read_processor

    compared: list[tuple[str, Any, Any, Sequence[str]]] = []
    if student is not None:
        tower = getattr(student, "vision_config", None)
        of_teacher = getattr(teacher.config, "vision_config", None)
        # Its size is the one of the largest image.
        is_limit = getattr(tower, "model_type", None) == "pixtral"
        compared = [
            ("config", student, teacher.config, _TOKENS),
            ("vision_config", tower, of_teacher, _VISION[is_limit:]),
        ]
    try:
        own = read_processor(os.path.expanduser(teacher.name), teacher.repository)
    except Exception as error:  # damaged files make transformers raise anything
        log.debug("the teacher's processor cannot be read: %r", error)
        log.warning(
            "%s: %s has no processor, so how it expects pixels to be scaled is not compared",
            KEY,
            teacher.name,
        )
    else:
        images = getattr(processor, "image_processor", None)
        compared += [
            ("image_processor", images, getattr(own, "image_processor", None), _PIXELS),
            ("feature_extractor", audio_processor_of(processor), audio_processor_of(own), _AUDIO),
        ]
    differing = [text for row in compared for text in _differing(*row)]
    if differing:
        raise RecipeError(
            "the teacher expects other images than the student's processor makes",
            where=f"{KEY}.from_pretrained",
            value=f"{teacher.name}: {'; '.join(differing)}",
            hint=_SAME_FAMILY,
        )


def _differing(part: str, student: Any, teacher: Any, names: Sequence[str]) -> Iterator[str]:
    """Describe the settings *names* that both objects have with different values."""
    for name in names:
        # As in JSON, which has lists in place of tuples.
        ours, its = (
            json.dumps(getattr(each, name, None), default=str) for each in (student, teacher)
        )
        if "null" not in (ours, its) and json.loads(ours) != json.loads(its):
            yield f"{part}.{name} is {its}, the student has {ours}"
