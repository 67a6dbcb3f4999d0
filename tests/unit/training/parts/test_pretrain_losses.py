"""The losses of the recipe pretrain are those of a plain loop: tests/fixtures/pretrain/make_losses.py recorded them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fixtures.pretrain import make_losses as reference
from tests.support.runs.training import train, write_recipe

RECORDED = json.loads(Path(reference.__file__).with_name("losses.json").read_text())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The initial weights, and the documents as nanoGPT stores them."""
    directory = tmp_path_factory.mktemp("data")
    reference.model().save_pretrained(directory / "model")
    flat = [token for document in reference.documents() for token in document]
    np.array(flat, np.uint16).tofile(directory / "tokens.bin")
    return directory


@pytest.mark.parametrize(
    "mode", ["split", "across", pytest.param("whole", marks=pytest.mark.further)]
)
def test_the_losses_of_ten_steps_are_those_of_a_plain_loop(
    tmp_path: Path, data: Path, mode: str
) -> None:
    config: dict[str, Any] = {"model_type": "llama", **reference.CONFIG}
    keys = {
        "whole": "",
        "split": "split_documents: true",
        "across": "split_documents: true, attend_across_documents: true",
    }
    recipe = f"""
recipe: pretrain
model: {{from_config: {json.dumps(config)}}}
init_from: {{path: {data}/model}}
tokenizer: null
dataset:
  _target_: automodel_ckpt.data.token_files.nanogpt
  path: {data}/tokens.bin
  header: false
  documents: true
  eos_token: {reference.END}
  seq_length: null
  vocab_size: 64
dataloader: {{shuffle: false}}
packed_sequence: {{size: {reference.SIZE}}}
pretrain: {{z_loss: {reference.Z_LOSS}, base_width: {reference.BASE_WIDTH}, {keys[mode]}}}
optimizer: {{lr: {reference.LR}, betas: [0.9, 0.95], weight_decay: {reference.DECAY}}}
lr_scheduler: {{name: cosine, warmup_steps: 2}}
step_scheduler:
  global_batch_size: {reference.BATCH}
  local_batch_size: 3
  max_steps: {reference.STEPS}
checkpoint: {{checkpoint_dir: {tmp_path}/run, save_optimizer: false}}
"""
    train(write_recipe(tmp_path, recipe))
    records = map(json.loads, (tmp_path / "run/training.jsonl").read_text().splitlines())
    found = [[record["loss"], record["z_loss"]] for record in records if "loss" in record]
    assert len(found) == reference.STEPS
    for own, recorded in zip(found, RECORDED[mode], strict=True):
        assert own == pytest.approx(recorded, rel=1e-5)
