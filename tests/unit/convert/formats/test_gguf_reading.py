"""GGUF files are read as models of Hugging Face: names, order of rows, values and config.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.cli.ckpt import main
from tests.support.external_tensors import error_of, values
from tests.support.models.gguf_models import MODELS, TinyModel
from tests.support.models.llamas import LLAMA_3_ROPE

Capture = pytest.CaptureFixture[str]
BY_NAME = {model.name: model for model in MODELS}
LLAMA_3 = TinyModel("Llama 3", "llama", "bpe:llama-bpe", config={"rope_parameters": LLAMA_3_ROPE})


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory


def written(model: TinyModel, directory: Path, *options: str) -> Path:
    pytest.importorskip("gguf")
    source, path = model.save(directory / "hf"), directory / "model.gguf"
    assert main(["export", str(source), "--to", "gguf", "-o", str(path), *options]) == 0
    return path


@pytest.mark.parametrize(
    "model",
    [
        LLAMA_3,
        BY_NAME["SmolLM 3"],
        pytest.param(BY_NAME["Qwen 2"], marks=pytest.mark.further),
        pytest.param(BY_NAME["Gemma 3, linear"], marks=pytest.mark.further),
    ],
    ids=lambda model: model.name,
)
def test_a_model_that_was_written_is_read_with_equal_logits(
    tmp_path: Path, model: TinyModel
) -> None:
    path = written(model, tmp_path, "--type", "F32")
    out = tmp_path / "out"
    assert main(["export", str(path), "-o", str(out)]) == 0
    read = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.arange(80).reshape(2, 40) * 7 % 500
    with torch.no_grad():
        expected = model.build(torch.float32)(ids).logits
        assert torch.allclose(read(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert type(read) is type(model.build())
    config = AutoConfig.from_pretrained(out)
    assert config.rms_norm_eps == 1e-6 and config.eos_token_id == 2


@pytest.mark.parametrize(
    "kind",
    [
        "Q8_0",
        *(
            pytest.param(kind, marks=pytest.mark.further)
            for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1")
        ),
    ],
)
def test_quantized_tensors_become_single_precision(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    path = written(BY_NAME["Llama 2"], tmp_path, "--type", kind)
    found = {name: tensor.numpy() for name, tensor in values(path).items()}
    state = BY_NAME["Llama 2"].build().state_dict()
    number = gguf.GGMLQuantizationType[kind]
    name = "model.layers.1.self_attn.k_proj.weight"
    # Rows are quantized one by one, so that their order makes no difference.
    blocks = gguf.quants.quantize(state[name].numpy(), number)
    assert np.array_equal(found[name], gguf.quants.dequantize(blocks, number))
    assert found["model.norm.weight"].dtype == np.float32
    assert {array.dtype.name for array in found.values()} == {"float32"}
    worst = np.abs(found["lm_head.weight"] - state["lm_head.weight"].numpy()).max()
    assert 0 < worst < 0.02


def test_the_commands_accept_the_file(tmp_path: Path, capsys: Capture) -> None:
    path = written(BY_NAME["Qwen 3"], tmp_path, "--type", "Q8_0")
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "general.architecture: qwen3" in shown and "30 Q8_0" in shown
    # Nothing is decoded to show it.
    assert list((tmp_path / "temporary").iterdir()) == []
    assert main(["import", str(path), str(tmp_path / "run")]) == 0
    assert "not imported  the tokenizer" in capsys.readouterr().out
    assert main(["diff", str(path), str(tmp_path / "run")]) == 0
    config = json.loads((tmp_path / "run/epoch_0_step_0/model/config.json").read_text())
    assert config["model_type"] == "qwen3" and config["dtype"] == "float32"


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("starcoder2", "general.architecture: 'starcoder2'"),
        ("llama", "num_hidden_layers: 2147483647"),
    ],
)
def test_a_model_that_cannot_be_converted_is_an_error_and_is_shown(
    tmp_path: Path, capsys: Capture, architecture: str, message: str
) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {"embedding_length": 32, "block_count": 2**31 - 1, "feed_forward_length": 32}
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["import", str(path), str(tmp_path / "run")]) == 3
    text = capsys.readouterr().err
    assert message in text and "gguf_file=" in text
    assert main(["show", str(path), "--tensors"]) == 0
    assert "token_embd.weight" in capsys.readouterr().out


def test_without_the_library_quantized_tensors_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    path = written(BY_NAME["Qwen 3"], tmp_path, "--type", "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["import", str(path), str(tmp_path / "run")]) == 2
    assert "automodel_ckpt[gguf]" in capsys.readouterr().err


# ---------------------------------------------------------------- decoded values


def test_values_are_decoded_once_and_removed_at_the_end(
    tmp_path: Path, own_temporary_directory: Path
) -> None:
    """Two processes share a directory; the last one removes it, and what a killed one left."""
    path = written(BY_NAME["Gemma 2"], tmp_path)
    base = own_temporary_directory / f"automodel_ckpt-values-{os.getuid()}"
    code = (
        "import os, sys; from pathlib import Path; from automodel_ckpt.convert.open import open_source\n"
        "print(open_source(Path(sys.argv[1])).side_files, flush=True)\n"
        "sys.stdin.readline() == 'die\\n' and os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"TMPDIR": str(own_temporary_directory)}
    processes = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        processes.append(process)
    lines = []
    for process in processes:
        assert process.stdout is not None
        lines.append(process.stdout.readline())
    assert lines[0] == lines[1] and Path(lines[0].strip()).is_dir()
    assert len(list(base.iterdir())) == 1
    processes[0].communicate("end\n")
    assert Path(lines[0].strip()).is_dir()
    processes[1].communicate("die\n")
    assert len(list(base.iterdir())) == 1
    # The next process removes what the killed one left, also of another file.
    values(written(BY_NAME["Llama 2"], tmp_path / "other"))
    assert not Path(lines[0].strip()).exists() and len(list(base.iterdir())) == 1


def test_a_part_of_a_model_is_an_error_that_names_llama_cpps_tool() -> None:
    part = Path(__file__).parents[3] / "fixtures" / "gguf" / "part" / "model-00001-of-00004.gguf"
    assert "llama-gguf-split --merge" in error_of(part)
