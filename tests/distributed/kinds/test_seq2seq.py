"""The recipe ``seq2seq``: any ranks train like one process; a killed run continues exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs.like_one_process import Way, check_killed_run, check_like_one_process
from tests.support.runs.pair_recipes import training
from tests.unit.training.runs.test_seq2seq import MODELS, losses, write

STEPS = "--step_scheduler.max_steps=4"
WAYS = {
    "fsdp2": ("--model.activation_checkpointing=true",),
    "ddp": ("--distributed.strategy=ddp", "--step_scheduler.local_batch_size=1"),
}


SWITCH = MODELS["tied"].replace(
    "model_type: t5",
    "model_type: switch_transformers, num_experts: 4, num_sparse_encoder_layers: 1,"
    " num_sparse_decoder_layers: 1, router_jitter_noise: 0.0",
)
"""A model that calls only the experts that a token of the micro-batch chooses."""


@pytest.mark.further
@pytest.mark.parametrize("model", ["tied", "switch"])
def test_ranks_train_like_one_process(tmp_path: Path, model: str) -> None:
    recipe = write(tmp_path, MODELS.get(model, SWITCH))
    ways = {"fsdp2": Way(WAYS["fsdp2"], (STEPS,))}
    ways["ddp"] = Way(WAYS["ddp"], (STEPS,))
    if model == "tied":
        lora = f"--peft={{r: 2, target_modules: all-linear, base_dir: {tmp_path / 'base'}}}"
        ways["lora"] = Way((), (STEPS, lora))
    whole = "--step_scheduler.local_batch_size=4"
    check_like_one_process(recipe, training, losses, ways, whole)


@pytest.mark.further
def test_a_killed_run_continues_exactly(tmp_path: Path) -> None:
    recipe = write(tmp_path, MODELS["tied"].replace("dropout_rate: 0.0", "dropout_rate: 0.2"))
    options = ("--step_scheduler.max_steps=6", "--step_scheduler.ckpt_every_steps=2")
    # An average of the weights is state, too.
    check_killed_run(recipe, training, *options, "--ema={decay: 0.9}")
