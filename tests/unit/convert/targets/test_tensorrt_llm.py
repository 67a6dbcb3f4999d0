"""Checkpoints of TensorRT-LLM: those of NVIDIA's exporter are read, and the same tensors are written.

The files in tests/fixtures/modelopt were written by nvidia-modelopt 0.47, from the Hugging Face files in ``hf/``.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.cli import ckpt
from tests.support.external_tensors import error_of, kind_of, values
from tests.support.models.llamas import llama_checkpoint

FIXTURES = Path(__file__).parents[3] / "fixtures" / "modelopt"
CASES = [("plain", 1), ("plain", 4), ("tied", 2)]
Capture = pytest.CaptureFixture[str]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def hugging_face(model: str) -> dict[str, torch.Tensor]:
    tensors = load_file(FIXTURES / model / "hf" / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    return tensors


def copied(model: str, num_ranks: int, directory: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / model / f"tp{num_ranks}", directory / "copy"))


def export(source: Path, output: Path, num_ranks: int, *options: str) -> int:
    arguments = ["export", str(source), "--to", "qnemo", "-o", str(output), *options]
    return ckpt.main([*arguments, "--tensor-parallel", str(num_ranks)])


def test_a_checkpoint_of_nvidias_exporter_is_read() -> None:
    directory = FIXTURES / "plain" / "tp1"
    assert kind_of(directory) == "a checkpoint of TensorRT-LLM"
    assert_equal(values(directory), hugging_face("plain"))
    assert "tensor parallel size 1" in error_of(FIXTURES / "plain" / "tp4")


@pytest.mark.parametrize(("model", "num_ranks"), CASES)
def test_the_exported_tensors_equal_those_of_nvidias_exporter(
    model: str, num_ranks: int, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert export(FIXTURES / model / "hf", output, num_ranks, "--compress", "false") == 0
    theirs = FIXTURES / model / f"tp{num_ranks}"
    for rank in range(num_ranks):
        name = f"rank{rank}.safetensors"
        assert_equal(load_file(output / name), load_file(theirs / name))
    ours = json.loads((output / "config.json").read_text())
    for key, value in json.loads((theirs / "config.json").read_text()).items():
        if key != "producer":
            assert ours.pop(key) == value, key
    # modelopt loses this with transformers 5.
    assert ours.pop("rotary_base") == 50_000.0
    assert ours == {"producer": {"name": "automodel_ckpt"}}


def test_a_checkpoint_of_a_run_becomes_an_archive_that_is_read_unpacked_and_packed(
    tmp_path: Path, capsys: Capture
) -> None:
    model = llama_checkpoint(tmp_path / "epoch_0_step_1", tied=False)
    target = tmp_path / "model.qnemo"
    assert export(tmp_path / "epoch_0_step_1", target, 1, "--cast-dtype", "bf16") == 0
    assert f"cast {len(model.state_dict())} tensors from F32 to BF16" in capsys.readouterr().err
    expected = {name: value.bfloat16() for name, value in model.state_dict().items()}
    assert_equal(values(target), expected)
    assert ckpt.main(["unpack", str(target), str(tmp_path / "files")]) == 0
    assert_equal(values(tmp_path / "files"), expected)
    assert (tmp_path / "files" / "huggingface_tokenizer" / "tokenizer.json").is_file()
    assert ckpt.main(["pack", str(tmp_path / "files"), str(tmp_path / "again.qnemo")]) == 0
    assert_equal(values(tmp_path / "again.qnemo"), expected)
    capsys.readouterr()
    assert ckpt.main(["show", str(target)]) == 0
    text = capsys.readouterr().out
    assert '"architecture": "LlamaForCausalLM"' in text
    assert "transformer.layers" in text


def test_import_does_not_take_the_config_for_that_of_hugging_face(
    tmp_path: Path, capsys: Capture
) -> None:
    source = FIXTURES / "plain" / "tp1"
    assert ckpt.main(["import", str(source), str(tmp_path / "run")]) == 0
    assert "no config.json" in capsys.readouterr().out
    assert_equal(values(tmp_path / "run" / "epoch_0_step_0"), hugging_face("plain"))


def changed(directory: Path, **options: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mapping": {"world_size": 8, "tp_size": 4, "pp_size": 2}}, "another than tensor"),
        ({"mapping": {"world_size": -1, "tp_size": -1}}, "another than tensor parallelism"),
        ({"num_attention_heads": 8}, "rows that the model's config implies"),
        ({"num_hidden_layers": 1}, "no rule for"),
        ({"num_hidden_layers": 3}, "tensor of the model is missing"),
    ],
)
def test_a_config_of_another_model_is_an_error(
    options: dict[str, object], message: str, tmp_path: Path, capsys: Capture
) -> None:
    directory = copied("plain", 1, tmp_path)
    changed(directory, **options)
    assert ckpt.main(["import", str(directory), str(tmp_path / "run")]) == 3
    assert message in capsys.readouterr().err


def test_quantized_weights_are_shown(tmp_path: Path, capsys: Capture) -> None:
    directory = copied("plain", 1, tmp_path)
    changed(directory, quantization={"quant_algo": "FP8"})
    assert ckpt.main(["show", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "attention.qkv.weight" in text and '"quant_algo": "FP8"' in text


@pytest.mark.parametrize(
    ("options", "num_ranks", "code", "message"),
    [
        ({}, 3, 2, "divides"),
        ({}, 8, 2, "divides"),
        ({"model_type": "gpt2"}, 1, 3, "only Llama and Mistral"),
        ({"attention_bias": True}, 1, 3, "attention_bias"),
        ({"num_key_value_heads": 4}, 1, 3, "rows that the model's config implies"),
    ],
)
def test_a_model_that_cannot_be_written_is_an_error(
    options: dict[str, object],
    num_ranks: int,
    code: int,
    message: str,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    source = Path(shutil.copytree(FIXTURES / "plain" / "hf", tmp_path / "hf"))
    changed(source, **options)
    assert export(source, tmp_path / "out.qnemo", num_ranks) == code
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
