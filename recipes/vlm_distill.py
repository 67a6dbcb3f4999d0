"""Knowledge distillation of a vision-language model: :mod:`.distill` on the data of :mod:`.vlm_finetune`.

Student and teacher get the same tokens and pixels, which the processor of the student makes.
"""

from __future__ import annotations

from automodel_ckpt.errors import Problem
from automodel_ckpt.recipes.distill import DistillationRecipe
from automodel_ckpt.recipes.vlm_finetune import VLMFinetune
from automodel_ckpt.training.kinds.teacher import PretrainedTeacher, check_images


class VLMDistill(DistillationRecipe, VLMFinetune):
    """Trains ``model`` to predict what the teacher of the section ``distill`` predicts on conversations with images."""

    def config_problems(self) -> list[Problem]:
        problems = super().config_problems()
        if self.section.top_k is not None:
            what = "the teacher's logits are cached for texts only"
            hint = "remove distill.top_k: the teacher predicts during training"
            problems.append(Problem(what, "distill.top_k", str(self.section.top_k), hint))
        return problems

    def compare_with_teacher(self, teacher: PretrainedTeacher) -> None:
        super().compare_with_teacher(teacher)
        check_images(teacher, self.model_config, self.processor)
