"""An adapter that transformers' Trainer and peft trained continues here with the same losses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.cli.ckpt import main
from tests.support.checkpoints import stored_bytes, stored_names
from tests.support.runs.continued import continued_losses

Capture = pytest.CaptureFixture[str]
FIXTURE = Path(__file__).parents[2] / "fixtures" / "trainer" / "adapter"
SOURCE = FIXTURE / "checkpoint-5"
BASE = FIXTURE / "base"


def test_an_adapter_continues_with_the_same_losses(tmp_path: Path) -> None:
    losses = continued_losses(SOURCE, tmp_path, base=BASE, num_ranks=2)
    expected = dict(enumerate(json.loads((FIXTURE / "losses.json").read_text()), start=1))
    assert losses == pytest.approx({step: expected[step] for step in range(6, 11)}, rel=1e-5)
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_weights_and_moments_of_an_adapter_are_equal_bit_for_bit(
    tmp_path: Path, capsys: Capture
) -> None:
    command = ["import", str(SOURCE), str(tmp_path / "run"), "--training-state"]
    assert main([*command, "--base", str(BASE)]) == 0
    text = capsys.readouterr().out
    assert '"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["model.norm"]' in text
    checkpoint = Path(text.splitlines()[-1])
    weights = load_file(SOURCE / "adapter_model.safetensors")
    assert stored_names(checkpoint, "model") == weights.keys()
    for name, weight in weights.items():
        assert stored_bytes(checkpoint, "model", name) == weight.numpy().tobytes(), name
    original = torch.load(SOURCE / "optimizer.pt", weights_only=True)
    # The norm is the only parameter without weight decay.
    assert original["param_groups"][1]["params"] == [8]
    names = {0: "layers.0.self_attn.q_proj.lora_A.default", 8: "norm.modules_to_save.default"}
    for number, name in names.items():
        for entry, value in original["state"][number].items():
            fqn = f"optimizer.state.model.base_model.model.model.{name}.weight.{entry}"
            assert stored_bytes(checkpoint, "optimizer", fqn) == value.numpy().tobytes(), fqn
    assert len(stored_names(checkpoint, "optimizer")) == 3 * len(original["state"])


def test_an_adapter_that_does_not_fit_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    source = shutil.copytree(SOURCE, tmp_path / "checkpoint-5")
    options = json.loads((source / "adapter_config.json").read_text())

    def error(*more: str, **changed: object) -> str:
        (source / "adapter_config.json").write_text(json.dumps({**options, **changed}))
        assert main(["import", str(source), str(tmp_path / "run"), *more]) == 3
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    text = error(base_model_name_or_path="somewhere/else")
    assert "the base of the adapter was not found" in text and "somewhere/else" in text
    base = f"--base={BASE}"
    text = error(base, r=3)
    assert "lora_A.weight: in the file [2, 8], in the model [3, 8]" in text
    text = error(base, rank_pattern={"q_proj": 4})
    assert "q_proj.lora_A.weight: in the file [2, 8], in the model [4, 8]" in text
    assert "a recipe has none like it" in error(base, init_lora_weights="pissa")
    assert "r: True" in error(base, r=True)
    assert "--base" in error("--config", str(BASE))
    assert main(["import", str(BASE), str(tmp_path / "run"), base]) == 2
    assert "no effect with a complete model" in capsys.readouterr().err
