"""``ckpt-train`` with ``init_from`` starts from the weights that other programs saved, in each format."""

import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from automodel_ckpt.cli.ckpt import main
from tests.fixtures.tiny_training import row
from tests.support.external_tensors import values
from tests.support.runs.continued import losses_of
from tests.support.runs.training import train, write_recipe

FIXTURES = Path(__file__).parents[2] / "fixtures"
VOCABULARY = 16
RECIPE = f"""
seed: 7
model:
  from_config: CONFIG
  dtype: float32
init_from:
  path: SOURCE
dataset:
  _target_: tests.fixtures.tiny_training.Rows
  num_samples: 4
  vocabulary: {VOCABULARY}
dataloader:
  shuffle: false
step_scheduler:
  global_batch_size: 4
  max_steps: 1
checkpoint:
  checkpoint_dir: RUN
"""
FIRST = {"DCP", "GGUF", "Megatron-Core"}
"""Others differ in how their files are read, which tests/unit/convert covers."""
# The source, and the directory of the model's config.json.
SOURCES = {
    "Hugging Face": ("modelopt/plain/hf", "modelopt/plain/hf"),
    "transformers Trainer": ("trainer/checkpoint-5", "trainer/checkpoint-5"),
    "FSDP2, full": ("fsdp/fsdp2-full", "fsdp/fsdp2-full"),
    "FSDP1, sharded": ("fsdp/fsdp1-sharded", "fsdp/fsdp1-sharded"),
    "DCP": ("fsdp/torch-nested", "fsdp/torch-nested"),
    "Lightning": ("lightning/epoch=0-step=5.ckpt", "lightning"),
    "Lightning, distributed": ("lightning/distributed", "lightning"),
    "torch file": ("torch_states/checkpoint_step_5_loss_4.0152.pt", "torch_states"),
    "AutoModel": (
        "automodel/run/epoch_0_step_4",
        "automodel/run/epoch_0_step_4/model/.hf_metadata",
    ),
    "GGUF": ("gguf/llama-q8_0/model.gguf", "gguf/llama-q8_0"),
    "Megatron-Core": ("megatron/llama", "megatron/llama/expected"),
    "Megatron-Core, experts": ("megatron/mixtral", "megatron/mixtral/expected"),
    "TensorRT-LLM": ("modelopt/plain/tp1", "modelopt/plain/hf"),
}


def first_loss(source: Path, config: Path, directory: Path) -> float:
    run = directory / "run"
    text = RECIPE.replace("CONFIG", str(config)).replace("SOURCE", f'"{source}"')
    train(write_recipe(directory, text.replace("RUN", str(run))))
    return losses_of(run)[1]


def loss_in_transformers(weights: dict[str, torch.Tensor], config: Path, directory: Path) -> float:
    """Return the loss that transformers computes with *weights*, which are written to *directory*."""
    directory.mkdir()
    shutil.copy(config / "config.json", directory)
    save_file(
        {name: weight.clone() for name, weight in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    tokens = torch.tensor([row(index, VOCABULARY) for index in range(4)])
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FIRST else pytest.mark.further) for name in SOURCES],
)
def test_a_run_starts_from_the_weights_of_another_program(name: str, tmp_path: Path) -> None:
    source, config = (FIXTURES / part for part in SOURCES[name])
    loss = first_loss(source, config, tmp_path)
    weights = values(source, config)
    assert loss == pytest.approx(loss_in_transformers(weights, config, tmp_path / "hf"), rel=1e-5)


@pytest.mark.further
def test_a_run_starts_from_a_checkpoint_of_torchtitan(tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / "torchtitan" / "checkpoint.tar.xz") as archive:
        archive.extractall(tmp_path / "titan", filter="data")
    (source,) = tmp_path.glob("titan/**/.metadata")
    config = FIXTURES / "torchtitan" / "config"
    loss = first_loss(source.parent, config, tmp_path)
    expected = loss_in_transformers(values(source.parent, config), config, tmp_path / "hf")
    assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.further
def test_a_run_starts_from_a_nemo_file(tmp_path: Path) -> None:
    config = FIXTURES / "trainer" / "checkpoint-5"
    file = tmp_path / "model.nemo"
    assert main(["export", str(config), "--to", "nemo", "--megatron-names", "-o", str(file)]) == 0
    loss = first_loss(file, config, tmp_path)
    assert loss == pytest.approx(
        loss_in_transformers(values(config), config, tmp_path / "hf"), rel=1e-5
    )
