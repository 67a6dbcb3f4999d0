"""Resume a file that ``ckpt export --to lightning`` wrote, with Lightning's own Trainer, and write the losses.

    python resume_lightning.py CKPT CONFIG_DIRECTORY NUM_SKIPPED_BATCHES REPORT

Lightning does not store the position within an epoch: the data loader here skips the batches that were trained.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

NUM_STEPS, BATCH_SIZE = 10, 4


class Module(lightning.LightningModule):
    """The model, and the optimizer with the groups that our recipes have: matrices decay, vectors do not."""

    def __init__(self, config: Path) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(AutoConfig.from_pretrained(config))
        self.losses: dict[int, float] = {}

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses[self.global_step + 1] = loss.item()
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() >= 2]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() < 2]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}])
        schedule = get_linear_schedule_with_warmup(optimizer, 2, NUM_STEPS)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Loader(DataLoader[Any]):
    """A loader that skips *num_skipped* batches of its first epoch."""

    num_skipped = 0

    def __iter__(self) -> Iterator[Any]:
        batches = iter(super().__iter__())
        for _ in range(self.num_skipped):
            next(batches)
        self.num_skipped = 0
        return batches


def main() -> None:
    checkpoint, config, num_skipped, report = sys.argv[1:]
    rows = torch.tensor(json.loads((Path(config) / "rows.json").read_text()))
    loader = Loader(rows, batch_size=BATCH_SIZE)
    loader.num_skipped = int(num_skipped)
    module = Module(Path(config))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=True)
    Path(report).write_text(json.dumps({"losses": module.losses, "step": trainer.global_step}))


if __name__ == "__main__":
    main()
