"""Exports to ONNX are staged as all exports, and compute what the class of config.json computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    BartConfig,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from automodel_ckpt.cli.ckpt import main
from tests.support.models.llamas import llama_checkpoint
from tests.support.models.sizes import model_sizes

Capture = pytest.CaptureFixture[str]


def test_without_the_packages_it_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    llama_checkpoint(tmp_path / "c")
    assert main(["export", str(tmp_path / "c"), "--to", "onnx"]) == 2
    assert "automodel_ckpt[onnx]" in capsys.readouterr().err


OF_BERT: dict[str, Any] = model_sizes(
    vocab=40, hidden=16, inner=16, layers=1, heads=2, positions=32
)
OF_BART: dict[str, Any] = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
}
OF_LLAMA: dict[str, Any] = {**OF_BERT, "num_key_value_heads": 1, "pad_token_id": 3}
KINDS: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "language model": (LlamaForCausalLM, LlamaConfig(**OF_LLAMA)),
    "classifier": (LlamaForSequenceClassification, LlamaConfig(**OF_LLAMA, num_labels=3)),
    "reranker of pairs": (BertForSequenceClassification, BertConfig(**OF_BERT, num_labels=1)),
    "embedding": (LlamaModel, LlamaConfig(**OF_LLAMA)),
}


@pytest.mark.further
@pytest.mark.parametrize("kind", KINDS)
def test_onnxruntime_computes_what_the_class_of_the_config_computes(
    tmp_path: Path, capsys: Capture, kind: str
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model_class, config = KINDS[kind]
    torch.manual_seed(0)
    model: Any = model_class(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    assert main(["export", str(tmp_path / "m"), "--to", "onnx", "-o", str(tmp_path / "out")]) == 0
    logged = capsys.readouterr().err
    assert f"cast {len(model.state_dict())} tensors from BF16 to F32" in logged
    assert ("cache of keys" in logged) == (kind == "language model")
    assert ("pooling" in logged) == (kind == "embedding")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    ids = torch.arange(4, 34).reshape(3, 10)
    ids[0, -2:] = 3
    inputs = {"input_ids": ids, "attention_mask": (ids != 3).long()}
    if kind == "reranker of pairs":
        inputs["token_type_ids"] = (torch.arange(10) > 5).long().expand(3, 10)
    (found,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    with torch.no_grad():
        expected = model.float().eval()(**inputs)
    name = "last_hidden_state" if kind == "embedding" else "logits"
    assert [each.name for each in session.get_outputs()] == [name]
    assert np.allclose(found, expected[name].numpy(), atol=1e-4)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "BertForQuestionAnswering"])
def test_a_kind_of_model_that_is_not_exported_is_an_error(
    tmp_path: Path, capsys: Capture, name: str
) -> None:
    config = BertConfig(**OF_BERT) if "Bert" in name else BartConfig(**OF_BART)
    getattr(transformers, name)(config).save_pretrained(tmp_path / "m")
    assert main(["export", str(tmp_path / "m"), "--to", "onnx", "-o", str(tmp_path / "out")]) == 3
    error = capsys.readouterr().err
    assert "this kind of model is not exported to ONNX" in error and name in error
    assert not (tmp_path / "out").exists()


def test_the_error_of_the_exporter_has_one_line_without_colors(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("\x1b[31mno \x1b[0moperator\nStep 3")

    LlamaForCausalLM(LlamaConfig(**OF_LLAMA)).save_pretrained(tmp_path / "m")
    monkeypatch.setattr(torch.onnx, "export", fail)
    assert main(["export", str(tmp_path / "m"), "--to", "onnx", "-o", str(tmp_path / "out")]) == 3
    assert "value:  ValueError: no operator\n" in capsys.readouterr().err
