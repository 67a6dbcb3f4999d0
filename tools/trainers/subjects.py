"""The runs that :mod:`tools.trainers` kills: tiny models in transformers' Trainer, TRL's trainers and Lightning."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped]
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from automodel_ckpt import CheckpointOptions
from automodel_ckpt.integrations.transformers import CheckpointCallback

NUM_WORDS = 60
NUM_ROWS = 16
_SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 3,
    "learning_rate": 1e-2,
    "logging_steps": 2,
    "save_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}
_ONLINE = {"num_generations": 2, "max_completion_length": 5, "gradient_accumulation_steps": 2}


def write_base(directory: Path) -> None:
    """Write the tiny model that all runs begin with, and its tokenizer."""
    special = ("<pad>", "<eos>", "<unk>")
    words = [*special, *(f"w{number}" for number in range(NUM_WORDS))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    make: Any = PreTrainedTokenizerFast  # it has no annotations
    make(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def _text(first: int, number: int) -> str:
    return " ".join(f"w{first + each}" for each in range(number))


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each))) for each in completions]


def _trainer(base: Path, output: str, lora: bool) -> Trainer:
    model = LlamaForCausalLM.from_pretrained(base)
    rows = [{"input_ids": [number + each for each in range(6)]} for number in range(3, NUM_ROWS)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    return Trainer(model, TrainingArguments(output, **_SHARED), train_dataset=rows)


def _trl(kind: str) -> Callable[[Path, str, bool], Trainer]:
    """Return what builds the trainer of TRL with this name."""

    def build(base: Path, output: str, lora: bool) -> Trainer:
        import trl

        settings, given = dict(_SHARED), dict[str, Any]()
        model: Any = LlamaForCausalLM.from_pretrained(base)
        rows: list[dict[str, Any]] = [{"prompt": _text(first, 2)} for first in range(8)]
        if kind == "SFT":
            rows = [{"text": _text(first, 5)} for first in range(NUM_ROWS)]
        elif kind in ("DPO", "Reward"):
            rows = [
                {"prompt": _text(n, 2), "chosen": f" w{n + 2}", "rejected": f" w{n + 3}"}
                for n in range(NUM_ROWS)
            ]
        elif kind == "KTO":
            rows = [
                {"prompt": _text(n, 2), "completion": f" w{n + 2}", "label": n % 2 == 0}
                for n in range(NUM_ROWS)
            ]
        else:
            settings |= {**_ONLINE, "num_iterations": 3, "num_train_epochs": 2}
            given["reward_funcs"] = _reward
        if kind in ("DPO", "KTO"):
            settings |= {"sync_ref_model": not lora, "ref_model_sync_steps": 2}
        if kind == "Reward":
            model = LlamaForSequenceClassification.from_pretrained(base, num_labels=1)
        if lora:
            from peft import LoraConfig

            given["peft_config"] = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        trainer: Trainer = getattr(trl, f"{kind}Trainer")(
            model=model,
            args=getattr(trl, f"{kind}Config")(output, **settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=PreTrainedTokenizerFast.from_pretrained(base),
            **given,
        )
        return trainer

    return build


def _run_trainer(
    build: Callable[..., Trainer], lora: bool, base: Path, run: Path, ours: bool
) -> nn.Module:
    trainer: Any = build(base, str(run / "theirs"), lora)
    compute_loss = trainer.compute_loss

    def recorded(model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        record(run, trainer.state.global_step, inputs)
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = recorded
    if ours:
        callback = CheckpointCallback(run / "ours", CheckpointOptions(keep_last=2))
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
    else:
        last: Any = get_last_checkpoint
        found = last(run / "theirs") if (run / "theirs").exists() else None
        trainer.train(resume_from_checkpoint=found)
    logs = [
        {key: value for key, value in entry.items() if not _is_measured(key)}
        for entry in trainer.state.log_history
        # A run that was killed when it was complete logs its summary twice.
        if "train_runtime" not in entry
    ]
    (run / "logs.json").write_text(json.dumps(logs))
    model: nn.Module = trainer.model
    return model


def _is_measured(key: str) -> bool:
    return "time" in key or "per_second" in key or key in ("train_loss", "total_flos")


def _run_lightning(base: Path, run: Path, ours: bool) -> nn.Module:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from automodel_ckpt.integrations.lightning import CheckpointCallback as LightningCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM.from_pretrained(base)

        def training_step(self, rows: torch.Tensor, number: int) -> Any:
            record(run, self.global_step, {"rows": rows})
            return self.model(rows, labels=rows).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    lightning.seed_everything(0, verbose=False)
    theirs = ModelCheckpoint(run / "theirs", every_n_train_steps=1, save_last=True)
    callback = LightningCallback(run / "ours", 1, CheckpointOptions(keep_last=2))
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=not ours,
        callbacks=[callback if ours else theirs],
    )
    last = run / "theirs" / "last.ckpt"
    module = Module()
    trainer.fit(module, _Batches(), ckpt_path=last if last.exists() and not ours else None)
    (run / "logs.json").write_text("[]")
    return module


class _Batches:
    """Batches in a random order of each epoch, with the position as state."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return NUM_ROWS // 4

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.given // len(self))
        order = torch.randperm(NUM_ROWS, generator=generator)
        parts: Any = order.split(4)  # type: ignore[no-untyped-call]
        for rows in parts[self.given % len(self) :]:
            self.given += 1
            yield rows[:, None] + torch.arange(3, 9)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


def record(run: Path, step: int, inputs: Mapping[str, Any]) -> None:
    """Append a line to ``order.txt``: the step, and a digest of the tensors that it trains on."""
    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        if isinstance(value, torch.Tensor):
            digest.update(name.encode() + value.detach().numpy(force=True).tobytes())
    with open(run / "order.txt", "a") as file:
        file.write(f"{step} {digest.hexdigest()}\n")
        file.flush()
        os.fsync(file.fileno())


SUBJECTS: dict[str, Callable[[Path, Path, bool], nn.Module]] = {
    "Trainer": partial(_run_trainer, _trainer, False),
    "SFTTrainer": partial(_run_trainer, _trl("SFT"), False),
    "SFTTrainer, LoRA": partial(_run_trainer, _trl("SFT"), True),
    "KTOTrainer": partial(_run_trainer, _trl("KTO"), False),
    "RewardTrainer": partial(_run_trainer, _trl("Reward"), False),
    "DPOTrainer": partial(_run_trainer, _trl("DPO"), False),
    "DPOTrainer, LoRA": partial(_run_trainer, _trl("DPO"), True),
    "GRPOTrainer": partial(_run_trainer, _trl("GRPO"), False),
    "GRPOTrainer, LoRA": partial(_run_trainer, _trl("GRPO"), True),
    "RLOOTrainer": partial(_run_trainer, _trl("RLOO"), False),
    "Lightning": _run_lightning,
}
"""Trains the model of a base in a run directory, with the trainer's own checkpoints or ours; returns the model."""
