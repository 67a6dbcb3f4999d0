"""The section ``hub``: uploads to the Hugging Face Hub during training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automodel_ckpt.base.hub_access import is_repo_name, is_revision_name
from automodel_ckpt.config.tree.rules import MISSING, NOT_EMPTY, Rule, setting

REPOSITORY = Rule(is_repo_name, "ORG/NAME, of letters, digits, -, _ and .")
REVISION = Rule(
    lambda name: name is None or is_revision_name(name),
    "the name of a branch, of letters, digits, -, _, . and /",
)


@dataclass
class HubConfig:
    """Upload the model to the Hugging Face Hub, with a model card, while training continues. The token is that of
    `hf auth login` or of HF_TOKEN."""

    repo: str = setting(MISSING, REPOSITORY)
    """Repository ORG/NAME. It is created if it does not exist."""
    push: Literal["final", "best", "every"] = "final"
    """final: the last checkpoint of a run that ends on its own; best: each checkpoint that becomes the best one; every:
    each checkpoint, to a branch step-N, and the best one (without validation, the newest) to revision too."""
    private: bool = True
    """Create a private repository, and upload to no public one."""
    revision: str | None = setting(None, REVISION)
    """Branch; null: the main branch."""
    card: str | None = setting(None, NOT_EMPTY)
    """Path of a README.md to upload; null: a model card is written from the run."""
    base_model: str | None = setting(None, REPOSITORY)
    """Name of the base model on the Hub for the card, if from_pretrained is a local directory."""
    license: str | None = setting(None, NOT_EMPTY)
    """License of the model for the card; null: that of the base model."""
    required: bool = False
    """End the run with an error if the last upload failed; false: with a warning."""
