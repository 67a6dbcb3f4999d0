"""Exports to ONNX are staged as all exports. That onnxruntime computes the same logits is shown by `make interop`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import BartConfig

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.convert.targets.onnx import export_onnx
from automodel_ckpt.errors import CheckpointUnusable, RecipeError, SaveFailed
from automodel_ckpt.models.onnx_export import export_to_onnx
from tests.support.llamas import llama_checkpoint

Capture = pytest.CaptureFixture[str]


def names_as_model(directory: Path, target: Path, dtype: str) -> None:
    """Stand for torch's exporter: the names of the weights that it would load, and the dtype."""
    names: list[str] = []
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            names += file.keys()
    target.write_text(json.dumps({"names": names, "dtype": dtype}))


def test_the_directory_has_the_model_and_its_side_files(tmp_path: Path) -> None:
    model = llama_checkpoint(tmp_path / "c", tied=False)
    lines: list[str] = []
    report = export_onnx(tmp_path / "c", None, names_as_model, log=lines.append)
    assert report.output == tmp_path / "c-onnx" and report.checked
    found = {path.name for path in report.output.iterdir()}
    assert {"model.onnx", "config.json", "tokenizer.json"} <= found
    assert not any(name.startswith(".") or name.endswith(".safetensors") for name in found)
    exported = json.loads((report.output / "model.onnx").read_text())
    assert set(exported["names"]) == set(model.state_dict()) and exported["dtype"] == "float32"
    assert any("no cache of keys and values" in line for line in lines)
    assert report.num_tensors == len(exported["names"])
    assert report.nbytes == sum(path.stat().st_size for path in report.output.iterdir())


def test_hugging_face_files_are_compared_with_their_digests(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "c")
    files = consolidate(tmp_path / "c", tmp_path / "hf", log=lambda _: None).output
    report = export_onnx(
        files, tmp_path / "out", names_as_model, cast_dtype="fp16", log=lambda _: None
    )
    assert json.loads((report.output / "model.onnx").read_text())["dtype"] == "float16"
    path = files / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointUnusable, match="digest"):
        export_onnx(files, tmp_path / "other", names_as_model, log=lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "hf", "out"]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "c")

    def fail(directory: Path, target: Path, dtype: str) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(target))

    with pytest.raises(SaveFailed, match="ENOSPC"):
        export_onnx(tmp_path / "c", tmp_path / "out", fail, log=lambda _: None)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_bytes(b"")
    with pytest.raises(SaveFailed, match="mine"):
        export_onnx(tmp_path / "c", tmp_path / "out", names_as_model, log=lambda _: None)


def test_a_model_without_a_config_is_an_error(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointUnusable, match=r"config\.json"):
        export_onnx(tmp_path / "model.pt", tmp_path / "out", names_as_model)
    with pytest.raises(RecipeError, match="cast"):
        export_onnx(tmp_path / "model.pt", tmp_path / "out", names_as_model, cast_dtype="int8")


def test_without_the_packages_it_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    (tmp_path / "c").mkdir()
    assert main(["export", str(tmp_path / "c"), "--to", "onnx"]) == 2
    assert "automodel_ckpt[onnx]" in capsys.readouterr().err


def test_an_encoder_decoder_is_not_exported_without_its_encoder(tmp_path: Path) -> None:
    config = BartConfig(architectures=["BartForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointUnusable, match="only causal language models") as error:
        export_to_onnx(tmp_path, tmp_path / "model.onnx", "float32")
    assert "an encoder and a decoder" in str(error.value)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnxscript", "onnxruntime")),
    reason="needs the extra onnx, and onnxruntime",
)
def test_onnxruntime_computes_the_same_logits(tmp_path: Path) -> None:
    import onnxruntime

    model = llama_checkpoint(tmp_path / "c")
    assert main(["export", str(tmp_path / "c"), "--to", "onnx"]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "c-onnx" / "model.onnx")
    ids = torch.arange(20).reshape(2, 10)
    inputs = {"input_ids": ids.numpy(), "attention_mask": np.ones((2, 10), np.int64)}
    (logits,) = session.run(None, inputs)
    with torch.no_grad():
        assert np.allclose(logits, model(ids).logits.numpy(), atol=1e-4)
