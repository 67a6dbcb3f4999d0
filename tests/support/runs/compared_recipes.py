"""Recipes of preferences that tests compare: with another program's runs, or with a reference model."""

from __future__ import annotations

import torch

from automodel_ckpt.config.keys.kinds import DPOConfig
from automodel_ckpt.recipes.dpo import DPOFinetune
from automodel_ckpt.recipes.preference import PreferenceFinetune, PreferenceObjective
from automodel_ckpt.training.parts.objective import Objective


class LoraLikeTrl(DPOFinetune):
    """Gives the adapters the values that they have in make_trl_losses.py."""

    def build(self) -> None:
        super().build()
        for number, (name, parameter) in enumerate(sorted(self.model.named_parameters())):
            if "lora_A" in name:
                count = torch.arange(parameter.numel(), dtype=torch.float64)
                values = 0.3 * torch.sin(1.3 * count + number)
                parameter.data.copy_(values.reshape(parameter.shape))


class Compared(PreferenceFinetune):
    """Fine-tuning next to a reference, whose objective is that of every language model."""

    objective_class: type[Objective] = PreferenceObjective
    section_key, section_class = "dpo", DPOConfig
