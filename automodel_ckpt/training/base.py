"""Names that recipes of former versions imported from here; new code imports them from the modules below."""

from automodel_ckpt.training.model.probes import Rows
from automodel_ckpt.training.recipe import Recipe as FinetuneRecipe
from automodel_ckpt.training.values.records import Control, Validation
from automodel_ckpt.training.values.step_numbers import StepResult

__all__ = ["Control", "FinetuneRecipe", "Rows", "StepResult", "Validation"]
