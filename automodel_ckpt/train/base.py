"""Names that recipes of former versions imported from here; new code imports them from the modules below."""

from automodel_ckpt.train.model.row_sharing import Rows
from automodel_ckpt.train.recipe import Recipe as FinetuneRecipe
from automodel_ckpt.train.values.records import Control, StepResult, Validation

__all__ = ["Control", "FinetuneRecipe", "Rows", "StepResult", "Validation"]
