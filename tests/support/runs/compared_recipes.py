"""A recipe of preferences that a test compares with another program's run."""

import torch

from automodel_ckpt.recipes.dpo import DPOFinetune


class LoraLikeTrl(DPOFinetune):
    """Gives the adapters the values that they have in make_trl_losses.py."""

    def build(self) -> None:
        super().build()
        for number, (name, parameter) in enumerate(sorted(self.model.named_parameters())):
            if "lora_A" in name:
                count = torch.arange(parameter.numel(), dtype=torch.float64)
                values = 0.3 * torch.sin(1.3 * count + number)
                parameter.data.copy_(values.reshape(parameter.shape))
