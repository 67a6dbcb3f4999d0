"""The recipe ``embedding``: files of encoders with names of older versions."""

from pathlib import Path

from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, BertForMaskedLM

from automodel_ckpt.cli.ckpt import main as run_ckpt
from tests.support.runs import pair_recipes
from tests.support.runs.training import train


def test_old_names_of_bert_files_are_those_of_its_backbone_and_head(tmp_path: Path) -> None:
    recipe = pair_recipes.write_embedding(tmp_path, "bert")
    config = AutoConfig.from_pretrained(tmp_path / "base")
    tensors = {}
    for name, tensor in BertForMaskedLM(config).state_dict().items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor.clone()
    assert "cls.predictions.transform.LayerNorm.gamma" in tensors
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    train(recipe, "--step_scheduler.max_steps=4")
    before = tensors["bert.encoder.layer.0.output.LayerNorm.gamma"]
    assert run_ckpt(["export", str(tmp_path / "run/LATEST"), "-o", str(tmp_path / "out")]) == 0
    after = AutoModel.from_pretrained(tmp_path / "out").state_dict()
    trained = after["encoder.layer.0.output.LayerNorm.weight"]
    assert 0 < (trained - before).abs().max() < 0.1
