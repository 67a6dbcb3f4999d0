"""Knowledge distillation in NeMo AutoModel's recipes: the teacher, its ranks, and the loss."""

from __future__ import annotations

from automodel_ckpt.config.automodel.model import AUTO_CLASS, DTYPES
from automodel_ckpt.config.automodel.rows import (
    Degraded,
    Key,
    Needs,
    NoEffect,
    Section,
    Steps,
    apply_rows,
    is_of_automodel,
)

_SAME_RANKS = "the teacher is shared over the ranks of the student"
TASKS = {
    "distill": ("CausalLM", "NeMoAutoModelForCausalLM"),
    "vlm_distill": ("ImageTextToText", "NeMoAutoModelForImageTextToText"),
}
"""Our recipe: the task of the class of its teacher, and the name of this class in AutoModel."""
NOT_DISTILLED = Needs(
    "teacher_model",
    "a teacher in this recipe",
    "set recipe: KnowledgeDistillationRecipeForNextTokenPrediction or KnowledgeDistillationRecipeForVLM, or remove the "
    "section",
)
TEACHER = (
    Key("pretrained_model_name_or_path", "from_pretrained"),
    Key("torch_dtype", "dtype", words=DTYPES, default="auto"),
    Key("attn_implementation"),
    Key("trust_remote_code"),
    Key("revision"),
    NoEffect("backend", "use_liger_kernel", "use_sdpa_patching", "sdpa_method", "force_hf"),
)
LOSS = (Key("temperature"), NoEffect("ignore_index", "fp32_upcast", "chunk_size", "tp_group"))
TOP = (
    Key("kd_ratio", where="distill.kd_ratio"),
    Key("offload_teacher_model", where="distill.offload_teacher"),
    Degraded("separate_meshes", _SAME_RANKS),
    Degraded("teacher_distributed", _SAME_RANKS),
    NoEffect("teacher_freeze_config"),
)


def teacher(section: Section) -> None:
    """Translate the model that is distilled."""
    if section.work.recipe not in TASKS:
        NOT_DISTILLED.apply(section.work.section(""))
        return
    task, name = TASKS[section.work.recipe]
    section = section.work.section(section.path, "distill.teacher")
    target = section.peek("_target_")
    if target is not None:
        found = AUTO_CLASS.fullmatch(str(target.value))
        section.take("_target_")
        if found is None or found["method"] != "from_pretrained" or found["task"] != task:
            hint = f"use {name}.from_pretrained"
            section.reject("_target_", target, "this teacher is not supported", hint)
            return
        section.translated("_target_", target, "recipe")
    apply_rows(TEACHER, section)


def loss(section: Section) -> None:
    """Translate the divergence. AutoModel's class KDLoss is the forward one, which is the default here."""
    if section.work.recipe not in TASKS or section.node is None:
        return
    section = section.work.section(section.path, "distill")
    target = section.take("_target_")
    name = "" if target is None else str(target.value)
    if target is not None and not (is_of_automodel(name) and name.endswith(".KDLoss")):
        hint = "use KDLoss, or remove kd_loss_fn and set distill.divergence"
        section.reject("_target_", target, "this divergence is not supported", hint)
        return
    if target is not None:
        section.translated("_target_", target, "distill.divergence")
    apply_rows(LOSS, section)


def top_level(section: Section) -> None:
    """Translate the keys beside the sections."""
    if section.work.recipe in TASKS:
        apply_rows(TOP, section)


ROWS = (
    ("teacher_model", Steps(teacher)),
    ("kd_loss_fn", Steps(loss)),
    ("", Steps(top_level)),
)
