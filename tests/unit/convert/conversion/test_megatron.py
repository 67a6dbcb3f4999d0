"""Distributed checkpoints that the real megatron-core wrote (tests/fixtures/megatron), read and imported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_ckpt.cli import ckpt
from tests.support.external_tensors import described, kind_of

FIXTURES = Path(__file__).parents[3] / "fixtures" / "megatron"
NAMES = ("llama", "qwen3", "mixtral")
Capture = pytest.CaptureFixture[str]


def logits(directory: Path, ids: list[int]) -> torch.Tensor:
    """The logits of transformers for one sequence: [tokens, vocabulary]."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", NAMES)
def test_an_imported_model_has_the_logits_of_the_real_megatron(
    name: str, tmp_path: Path, capsys: Capture
) -> None:
    expected = json.loads((FIXTURES / name / "expected" / "logits.json").read_text())
    config = str(FIXTURES / name / "expected")
    command = ["import", "--json", str(FIXTURES / name), str(tmp_path / "run"), "--config", config]
    assert ckpt.main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["has_config"] and document["kind"] == "a run of Megatron-LM"
    found = logits(Path(document["checkpoint"]) / "model", expected["ids"])
    torch.testing.assert_close(found, torch.tensor(expected["logits"]), rtol=1e-4, atol=1e-5)


def test_counters_are_reported_and_the_optimizer_is_not_imported(
    tmp_path: Path, capsys: Capture
) -> None:
    source = FIXTURES / "llama"
    config = ["--config", str(source / "expected")]
    for path in (source, source / "iter_0000020"):
        command = ["import", str(path), str(tmp_path / "run"), *config]
        assert ckpt.main([*command, "--dry-run", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["step"] == 20
        assert document["left_out"] == [
            "the state of the optimizer and of the ranks (2 entries)",
            "8 _extra_state objects of Transformer Engine",
        ]
        assert ckpt.main([*command, "--training-state"]) == 3
        assert "flat buffers" in capsys.readouterr().err
        assert ckpt.main(["show", str(path)]) == 0
        shown = capsys.readouterr().out
        assert "decoder.layers.self_attention.linear_qkv.weight" in shown


def test_a_config_beside_a_checkpoint_converts_its_names(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(FIXTURES / "llama" / "iter_0000020", tmp_path / "checkpoint")
    source = described(checkpoint)
    assert "output_layer.weight" in source.tensors and "config.json" in source.notes[-1]
    shutil.copy(FIXTURES / "llama" / "expected" / "config.json", checkpoint)
    # Without the padding of the vocabulary.
    assert described(checkpoint).tensors["lm_head.weight"].shape[0] == 29


def test_weights_for_an_unknown_model_are_an_error_that_asks_for_its_config(
    tmp_path: Path, capsys: Capture
) -> None:
    source = FIXTURES / "qwen3"
    assert "decoder.layers.1.mlp.linear_fc1.weight" in described(source).tensors
    assert ckpt.main(["import", str(source), str(tmp_path / "run")]) == 3
    assert "--config DIR" in capsys.readouterr().err
    other = ["--config", str(FIXTURES / "mixtral" / "expected")]
    assert ckpt.main(["import", str(source), str(tmp_path / "run"), *other]) == 3
    assert "does not have the rows" in capsys.readouterr().err
    nothing = ["--config", str(tmp_path)]
    assert ckpt.main(["import", str(source), str(tmp_path / "run"), *nothing]) == 3
    assert "no config.json" in capsys.readouterr().err


def test_nemo_2_and_the_older_backend_are_recognized(tmp_path: Path) -> None:
    (tmp_path / "nemo" / "context").mkdir(parents=True)
    shutil.copytree(FIXTURES / "llama" / "iter_0000020", tmp_path / "nemo" / "weights")
    assert "NeMo 2" in kind_of(tmp_path / "nemo")
    assert "embedding.word_embeddings.weight" in described(tmp_path / "nemo").tensors
