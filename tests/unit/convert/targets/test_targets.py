"""What every target of ``ckpt export`` guarantees: damage is reported, and nothing is written."""

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel

from automodel_ckpt.cli.ckpt import main
from tests.support.models.llamas import llama_checkpoint
from tests.support.models.sizes import model_sizes
from tests.support.models.small_tokenizer import small_tokenizer

GGUF = Path(__file__).parents[3] / "fixtures" / "gguf" / "llama-q8_0"
OPTIONS = {"compressed-tensors": ["--scheme", "W8A8"], "nemo": ["--prefix", "model."]}
LIBRARIES = {"compressed-tensors": "compressed_tensors", "gguf": "gguf", "onnx": "onnxscript"}


def named_by_help() -> list[str]:
    """The targets that ``ckpt export --help`` names."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(["export", "--help"])
    names = text.getvalue().partition("--to {")[2].partition("}")[0].split(",")
    assert names[:2] == ["hf", "gguf"] and len(names) > 9
    return names


# The Trainer's directory needs optimizer state, which this checkpoint does not have.
TARGETS = [target for target in named_by_help() if target != "trainer"]


def require_library(target: str) -> None:
    library = LIBRARIES.get(target)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")


@pytest.mark.parametrize("target", TARGETS)
def test_no_target_writes_a_damaged_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    require_library(target)
    checkpoint = tmp_path / "source" / "epoch_0_step_4"
    llama_checkpoint(checkpoint, dtype=torch.float32)
    shard = next((checkpoint / "model").glob("shard-00002*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    out = tmp_path / "out"
    out.mkdir()
    arguments = [str(checkpoint), "--to", target, "-o", str(out / "x")]
    code = main(["export", *arguments, *OPTIONS.get(target, [])])
    said = capsys.readouterr().err
    assert code == 3, said
    assert shard.name in said or "digest" in said, said
    assert list(out.iterdir()) == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "epoch_0_step_4"
    llama_checkpoint(path, dtype=torch.float32)
    return path


@pytest.mark.parametrize("words", ["--to trainer", "--to lightning"])
def test_no_run_is_exported_with_the_average_of_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    checkpoint, out = tmp_path / "epoch_0_step_4", tmp_path / "out"
    (checkpoint / "ema").mkdir(parents=True)
    (checkpoint / "MANIFEST.json").write_text("{}")
    for source in ([str(checkpoint), "--ema"], [str(checkpoint / "ema")]):
        assert main(["export", *source, *words.split(), "-o", str(out)]) == 2
        assert "has no optimizer state" in capsys.readouterr().err
    assert not out.exists()


def test_the_directory_of_the_weights_means_its_checkpoint_for_the_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "epoch_0_step_4"
    llama_checkpoint(checkpoint, dtype=torch.float32)
    messages = []
    for source in (checkpoint, checkpoint / "model"):
        assert main(["export", str(source), "--to", "trainer", "-o", str(tmp_path / "out")]) == 3
        messages.append(capsys.readouterr().err)
    assert messages[0] == messages[1] and "weights only" in messages[0]


@pytest.fixture(scope="module")
def float32_of_bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32 of a base in bfloat16."""
    path = tmp_path_factory.mktemp("run") / "epoch_0_step_4"
    llama_checkpoint(path, tied=False, base=path.parent / "base")
    return path


# ONNX: test_onnx.py.
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "onnx"])
def test_dtypes_are_those_of_the_checkpoint_and_each_cast_is_reported(
    tmp_path: Path, float32_of_bfloat16: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    require_library(target)
    arguments = [str(float32_of_bfloat16), "--to", target, *OPTIONS.get(target, [])]
    assert main(["export", *arguments, "-o", str(tmp_path / "x")]) == 0
    logged = capsys.readouterr().err
    # TensorRT-LLM has only 16-bit types. The other targets round nothing, and neither does what they do before.
    casts = {"hf": "BF16", "qnemo": "F16"}
    if target in casts:
        assert f"cast 21 tensors from F32 to {casts[target]}" in logged
    else:
        assert "from F32" not in logged
    if target == "hf":
        return
    assert main(["export", *arguments, "-o", str(tmp_path / "y"), "--cast-dtype", "bf16"]) == 0
    # Vectors stay float32 in GGUF.
    num_tensors = 16 if target == "gguf" else 21
    assert f"cast {num_tensors} tensors from F32 to BF16" in capsys.readouterr().err


@pytest.mark.parametrize("target", [*TARGETS, "nemo --megatron-names"])
@pytest.mark.parametrize("fault", ["missing", "left over", "missing in a checkpoint"])
def test_no_target_writes_a_model_with_other_tensors_than_its_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, fault: str
) -> None:
    require_library(target)
    name = "model.layers.1.mlp.up_proj.weight"
    source = tmp_path / "source"
    if fault == "missing in a checkpoint":
        llama_checkpoint(source, lost=name)
    else:
        tokenizer = small_tokenizer()
        config = LlamaConfig(
            **model_sizes(vocab=len(tokenizer), hidden=16, inner=16, layers=2, heads=2, kv_heads=1)
        )
        model = LlamaForCausalLM(config)
        state = dict(model.state_dict())
        if fault == "missing":
            del state[name]
        else:
            name = "score.weight"
            state[name] = torch.zeros(2, 16)
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        save_file(state, source / "model.safetensors", {"format": "pt"})
    words = [*target.split(), *OPTIONS.get(target, [])]
    assert main(["export", str(source), "--to", *words, "-o", str(tmp_path / "out")]) == 3
    error = capsys.readouterr().err
    assert name in error and "hint:" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["gguf", "megatron", "nemo --megatron-names", "qnemo"])
@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, LlamaModel])
def test_targets_of_language_models_write_no_other_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, kind: Any
) -> None:
    """Without its output layer, an embedding model looks like a language model with tied weights."""
    require_library(target)
    config = LlamaConfig(
        **model_sizes(vocab=40, hidden=16, inner=16, layers=1, heads=2, kv_heads=1)
    )
    kind(config).save_pretrained(tmp_path / "m")
    if kind is LlamaModel:
        # As in files that were made from a causal language model.
        state = load_file(tmp_path / "m" / "model.safetensors")
        state = {f"model.{name}": value for name, value in state.items()}
        save_file(state, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    small_tokenizer().save_pretrained(tmp_path / "m")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "m"), "--to", *target.split(), "-o", str(out)]) == 3
    error = capsys.readouterr().err
    assert kind.__name__ in error and "--to hf" in error
    assert not out.exists()
