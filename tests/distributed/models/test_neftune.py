"""Noise on embeddings: its size for each sample, the loss of plain PyTorch with the same noise."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.distributed.kinds.test_training import lines, lines_of_steps, run_each
from tests.distributed.parallel.test_router_loss import ONE_STEP, one_step
from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.runs.training import RECIPE, VALIDATION, write_recipe
from tests.support.runs.training_parts import uneven

ALPHA = 5.0
NOISE = f"--model.neftune_alpha={ALPHA}"
NO_DROPOUT = "--model.from_config.attention_dropout=0.0"


def reference(weights: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers with the noise that the paper defines, for the global batch as one batch."""
    samples = uneven(8)
    width = max(len(sample["input_ids"]) for sample in samples)
    tokens = torch.zeros(8, width, dtype=torch.int64)
    labels = torch.full((8, width), -100)
    mask = torch.zeros(8, width, dtype=torch.int64)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        tokens[row, :length] = torch.tensor(sample["input_ids"])
        labels[row, :length] = torch.tensor(sample["labels"])
        mask[row, :length] = 1
    config = LlamaConfig(
        **model_sizes(vocab=304, hidden=32, inner=48, layers=2, heads=4, kv_heads=2, positions=32),
        tie_word_embeddings=True,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(weights, strict=False)
    # As rank 0 of a run with the seed 7.
    of_rank = np.random.SeedSequence([7, 0]).generate_state(1, np.uint64)
    torch.manual_seed(int(of_rank[0]) % 2**63)
    embedded = model.get_input_embeddings()(tokens)
    uniform = torch.empty_like(embedded).uniform_(-1, 1)
    for row in range(8):
        embedded[row] = embedded[row] + uniform[row] * ALPHA / math.sqrt(mask[row].sum() * 32)
    logits = model(inputs_embeds=embedded, attention_mask=mask, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.further)])
def test_loss_and_gradients_are_those_of_plain_pytorch_also_with_tensor_parallelism(
    tmp_path: Path, tp_size: int
) -> None:
    step = partial(
        one_step,
        write_recipe(tmp_path),
        f"--checkpoint.checkpoint_dir={tmp_path / 'run'}",
        *ONE_STEP,
        f"--distributed.tp_size={tp_size}",
        NOISE,
        NO_DROPOUT,
        "--model.from_config.vocab_size=304",
        "--step_scheduler.local_batch_size=8",
        "--dataloader.padding_free=false",
    )
    weights, gradients = ranks.run(step, tp_size, init=False)[0]
    loss, expected = reference(weights)
    (line,) = lines_of_steps(tmp_path / "run/training.jsonl")
    assert line["loss"] == pytest.approx(loss, rel=1e-6)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[parameter], rtol=1e-4, atol=2e-6, msg=parameter
        )


@pytest.mark.further
def test_validation_has_no_noise(tmp_path: Path) -> None:
    without = ("--optimizer.lr=0.0", "--step_scheduler.max_steps=1", NO_DROPOUT)
    runs = {"plain": without, "noise": (*without, NOISE)}
    run_each(tmp_path, runs, num_ranks=1, text=RECIPE + VALIDATION)
    plain, noise = (lines(tmp_path / name / "validation.jsonl") for name in runs)
    assert plain[0]["val_loss"] == noise[0]["val_loss"]
    losses = [lines_of_steps(tmp_path / name / "training.jsonl")[0]["loss"] for name in runs]
    assert losses[0] != losses[1]
