"""Distributed checkpoints that the real megatron-core wrote (tests/fixtures/megatron), read and imported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_ckpt.cli import ckpt
from automodel_ckpt.convert.formats.registry import detect
from automodel_ckpt.convert.imports.import_checkpoint import ImportOptions, prepare
from automodel_ckpt.convert.imports.new_checkpoint import write_checkpoint
from automodel_ckpt.convert.open import open_source

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
def test_an_imported_model_has_the_logits_of_the_real_megatron(name: str, tmp_path: Path) -> None:
    expected = json.loads((FIXTURES / name / "expected" / "logits.json").read_text())
    planned = prepare(
        FIXTURES / name, tmp_path / "run", ImportOptions(config=FIXTURES / name / "expected")
    )
    assert planned.has_config and planned.kind == "a run of Megatron-LM"
    model = write_checkpoint(planned) / "model"
    found = logits(model, expected["ids"])
    torch.testing.assert_close(found, torch.tensor(expected["logits"]), rtol=1e-4, atol=1e-5)


def test_counters_are_reported_and_the_optimizer_is_not_imported(
    tmp_path: Path, capsys: Capture
) -> None:
    source = FIXTURES / "llama"
    planned = prepare(source, tmp_path / "run", ImportOptions(config=source / "expected"))
    assert planned.left_out == (
        "the state of the optimizer and of the ranks (2 entries)",
        "8 _extra_state objects of Transformer Engine",
    )
    for path in (source, source / "iter_0000020"):
        known = detect(path)
        assert known is not None
        counters = known.counters(path)
        assert (counters.step, counters.consumed_samples) == (20, 640)
        assert "flat buffers" in known.training_left(path)
        assert ckpt.main(["show", str(path)]) == 0
        shown = capsys.readouterr().out
        assert "decoder.layers.self_attention.linear_qkv.weight" in shown


def test_a_config_beside_a_checkpoint_converts_its_names(tmp_path: Path) -> None:
    checkpoint = shutil.copytree(FIXTURES / "llama" / "iter_0000020", tmp_path / "checkpoint")
    source = open_source(checkpoint)
    assert "output_layer.weight" in source.tensors and "config.json" in source.notes[-1]
    shutil.copy(FIXTURES / "llama" / "expected" / "config.json", checkpoint)
    # Without the padding of the vocabulary.
    assert open_source(checkpoint).tensors["lm_head.weight"].shape[0] == 29


def test_weights_for_an_unknown_model_are_an_error_that_asks_for_its_config(
    tmp_path: Path, capsys: Capture
) -> None:
    source = FIXTURES / "qwen3"
    assert "decoder.layers.1.mlp.linear_fc1.weight" in open_source(source).tensors
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
    known = detect(tmp_path / "nemo")
    assert known is not None and "NeMo 2" in known.name
    assert "embedding.word_embeddings.weight" in open_source(tmp_path / "nemo").tensors
    assert known.parts(tmp_path / "nemo") == {"weights"}
