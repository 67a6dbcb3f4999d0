"""Knowledge distillation in NeMo AutoModel's recipes: the teacher, its ranks, and the loss."""

from __future__ import annotations

from automodel_ckpt.config.automodel.model import AUTO_CLASS
from automodel_ckpt.config.automodel.rows import Section, is_of_automodel

_TASKS = {
    "distill": ("CausalLM", "NeMoAutoModelForCausalLM"),
    "vlm_distill": ("ImageTextToText", "NeMoAutoModelForImageTextToText"),
}
"""Our recipe: the task of the class of its teacher, and the name of this class in AutoModel."""
_NOT_DISTILLED = (
    "! teacher_model: a teacher in this recipe | set recipe: KnowledgeDistillationRecipeForNextTokenPrediction or "
    "KnowledgeDistillationRecipeForVLM, or remove the section"
)


def teacher(section: Section) -> None:
    """Translate the model that is distilled."""
    if section.work.recipe not in _TASKS:
        section.work.section("").apply(_NOT_DISTILLED)
        return
    task, name = _TASKS[section.work.recipe]
    section = section.work.section(section.path, "distill.teacher")
    target = section.implied("_target_", "recipe")
    found = None if target is None else AUTO_CLASS.fullmatch(str(target.value))
    if target is not None and (
        found is None or found["method"] != "from_pretrained" or found["task"] != task
    ):
        hint = f"use {name}.from_pretrained"
        section.reject("_target_", target, "this teacher is not supported", hint)
        return
    section.apply("""
        pretrained_model_name_or_path -> from_pretrained
        torch_dtype -> dtype @dtypes = auto
        attn_implementation
        trust_remote_code
        revision
        - backend use_liger_kernel use_sdpa_patching sdpa_method force_hf
    """)


def loss(section: Section) -> None:
    """Translate the divergence. AutoModel's class KDLoss is the forward one, which is the default here."""
    if section.work.recipe not in _TASKS:
        return
    section = section.work.section(section.path, "distill")
    target = section.implied("_target_", "distill.divergence")
    name = "" if target is None else str(target.value)
    if target is not None and not (is_of_automodel(name) and name.endswith(".KDLoss")):
        hint = "use KDLoss, or remove kd_loss_fn and set distill.divergence"
        section.reject("_target_", target, "this divergence is not supported", hint)
        return
    section.apply("temperature\n- ignore_index fp32_upcast chunk_size tp_group")


def top_level(section: Section) -> None:
    """Translate the keys beside the sections."""
    if section.work.recipe in _TASKS:
        section.apply("""
            kd_ratio -> /distill.kd_ratio
            offload_teacher_model -> /distill.offload_teacher
            ~ separate_meshes: the teacher is shared over the ranks of the student
            ~ teacher_distributed: the teacher is shared over the ranks of the student
            - teacher_freeze_config
        """)
