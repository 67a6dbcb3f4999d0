"""Files of llama.cpp's own converter are read exactly, and written again with the same bytes of tensors.

tests/fixtures/gguf/make.py made them.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_ckpt.cli.ckpt import main
from tests.support.external_tensors import described, values

FIXTURES = Path(__file__).parents[3] / "fixtures" / "gguf"
NAMES = ("qwen3-f16", "llama-q8_0", "gemma2-q8_0")
# The converter names a model after its directory, and writes defaults of llama.cpp for fewer or more keys.
NOT_COMPARED = {
    "GGUF.kv_count",
    "general.name",
    "general.size_label",
    "tokenizer.chat_template",
    "tokenizer.ggml.scores",
}
DEFAULTS = {
    "tokenizer.ggml.add_eos_token": False,
    "tokenizer.ggml.add_bos_token": False,
    "gemma2.rope.freq_base": 10_000.0,
    "gemma2.rope.dimension_count": 16,
    "gemma2.vocab_size": 364,
    "qwen3.rope.dimension_count": 16,
    "qwen3.vocab_size": 364,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_converter_has_the_models_values(name: str) -> None:
    pytest.importorskip("gguf")
    directory = FIXTURES / name
    expected = json.loads((directory / "expected.json").read_text())
    found = values(directory / "model.gguf")
    assert found.keys() == expected.keys()
    for fqn, (shape, digest) in expected.items():
        assert list(found[fqn].shape) == shape
        content = found[fqn].float().numpy().tobytes()
        assert hashlib.sha256(content).hexdigest() == digest, fqn
    config = json.loads(
        (described(directory / "model.gguf").side_files / "config.json").read_text()
    )
    original = json.loads((directory / "config.json").read_text())
    rope = {"rope_type": "default"} | config.pop("rope_scaling", {})
    assert rope | {"rope_theta": config.pop("rope_theta")} == original["rope_parameters"]
    config.pop("dtype")
    assert {key: original[key] for key in config} == config


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_written_as_the_converter_writes_it(name: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    directory = FIXTURES / name
    files, output = tmp_path / "hf", tmp_path / "model.gguf"
    assert main(["export", str(directory / "model.gguf"), "-o", str(files)]) == 0
    (files / "export_manifest.json").unlink()
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(directory / file, files / file)
    kind = name.partition("-")[2]
    command = ["export", str(files), "--to", "gguf", "--type", kind]
    assert main([*command, "-o", str(output)]) == 0
    theirs, ours = gguf.GGUFReader(directory / "model.gguf"), gguf.GGUFReader(output)
    for one, other in zip(theirs.tensors, sorted_as(ours.tensors, theirs.tensors), strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        assert one.data.tobytes() == other.data.tobytes(), one.name
    # Llama's beginning of text is stated by both.
    assert stated_defaults(ours) | contents(theirs) == contents(ours)


def sorted_as(tensors: Any, others: Any) -> list[Any]:
    by_name = {tensor.name: tensor for tensor in tensors}
    assert len(by_name) == len(others)
    return [by_name[tensor.name] for tensor in others]


def contents(reader: Any) -> dict[str, Any]:
    return {
        key: field.contents() for key, field in reader.fields.items() if key not in NOT_COMPARED
    }


def stated_defaults(reader: Any) -> dict[str, Any]:
    """The defaults that our file states, for keys that the converter does not write."""
    return {key: value for key, value in DEFAULTS.items() if key in reader.fields}


def test_blocks_are_quantized_as_ggml_quantizes_them() -> None:
    gguf = pytest.importorskip("gguf")
    blocks = np.load(FIXTURES / "blocks.npz")
    for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        found = gguf.quants.quantize(blocks["values"], gguf.GGMLQuantizationType[kind])
        assert np.array_equal(found, blocks[kind]), kind
