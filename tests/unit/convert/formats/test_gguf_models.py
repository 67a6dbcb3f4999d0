"""Models of every architecture become GGUF files with the keys, tensors and types that llama.cpp needs.

That llama.cpp then gives the same tokens is shown by `make interop`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_ckpt.convert.formats.gguf.model import read_model
from automodel_ckpt.convert.formats.gguf.pre_tokenizers import PRE_TOKENIZERS
from automodel_ckpt.convert.formats.gguf.tokenizer import convert_tokenizer
from automodel_ckpt.convert.targets.flow import export_to
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models.gguf_models import MODELS, TinyModel, byte_level, sentencepiece_like

BY_NAME = {model.name: model for model in MODELS}
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def exported(name: str, directory: Path, **options: Any) -> Any:
    """Export a model of the table; the reader of the library."""
    gguf = pytest.importorskip("gguf")
    source = BY_NAME[name].save(directory / "hf")
    report = export_to("gguf", source, directory / "model.gguf", log=lambda _: None, **options)
    return gguf.GGUFReader(report.output), report


@pytest.mark.parametrize(
    "name",
    [
        "Qwen 3",
        "Gemma 3, linear",
        pytest.param("Qwen 2, tied", marks=pytest.mark.further),
        pytest.param("SmolLM 3", marks=pytest.mark.further),
    ],
)
def test_the_library_reads_the_file_with_all_tensors(tmp_path: Path, name: str) -> None:
    reader, report = exported(name, tmp_path, tensor_type="F32")
    model = BY_NAME[name].build()
    state = model.state_dict()
    described = read_model(model.config.to_dict(), "")
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    assert found.keys() == {tensor.name for tensor in described.tensors()}
    for tensor in described.tensors():
        values = state[tensor.fqn].float().numpy() + np.float32(tensor.offset)
        if tensor.heads is not None:
            # Each head's second half becomes the odd rows.
            halves = values.reshape(tensor.heads, 2, -1, values.shape[1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        assert np.array_equal(found[tensor.name], values), tensor.name
    assert report.details["kinds"] == {"F32": len(found)}


@pytest.mark.parametrize(
    "kind", ["Q8_0", *(pytest.param(kind, marks=pytest.mark.further) for kind in QUANTIZED[1:])]
)
def test_quantized_blocks_are_those_of_the_library(tmp_path: Path, kind: str) -> None:
    reader, report = exported("Qwen 2", tmp_path, tensor_type=kind.lower())
    gguf = pytest.importorskip("gguf")
    state = BY_NAME["Qwen 2"].build().state_dict()
    number = gguf.GGMLQuantizationType[kind]
    found = {tensor.name: tensor for tensor in reader.tensors}
    values = state["model.layers.2.mlp.down_proj.weight"].numpy()
    assert np.array_equal(found["blk.2.ffn_down.weight"].data, gguf.quants.quantize(values, number))
    kinds = {name: tensor.tensor_type.name for name, tensor in found.items()}
    # The output layer has more bits, and vectors have all.
    assert kinds["token_embd.weight"] == kind and kinds["output.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.0.attn_q.bias"] == "F32"
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{kind}"]
    assert reader.fields["general.quantization_version"].contents() == 2
    assert sum(report.details["kinds"].values()) == len(found)


def test_rows_that_are_no_whole_blocks_are_half_precision(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    ragged = TinyModel("ragged", "qwen2", "bpe:gpt-2", config={"intermediate_size": 150})
    source = ragged.save(tmp_path / "hf")
    report = export_to("gguf", source, tmp_path / "m.gguf", tensor_type="Q4_0", log=lambda _: None)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(report.output).tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.0.ffn_up.weight"] == "Q4_0"
    assert any("4 tensors are written as F16" in text for text in report.warnings)


def test_a_window_that_llama_cpp_lacks_limits_the_context(tmp_path: Path) -> None:
    reader, report = exported("Mistral, sliding", tmp_path)
    assert reader.fields["llama.context_length"].contents() == 128
    assert any("128 tokens" in text for text in report.warnings)
    assert reader.fields["tokenizer.ggml.pre"].contents() == "tekken"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("Gemma 2", {"query_pre_attn_scalar": 128}, "query_pre_attn_scalar"),
        ("Gemma 2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("Gemma 2", {"layer_types": ["full_attention"] * 4}, "layer_types[0]"),
        ("Gemma 3", {"rope_parameters": {"sliding_attention": 5}}, "rope_parameters"),
        ("SmolLM 3", {"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers"),
        ("Qwen 2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ("Mistral, sliding", {"sliding_window": "x"}, "sliding_window"),
    ],
)
def test_variants_that_llama_cpp_computes_otherwise_are_rejected(
    name: str, change: dict[str, Any], said: str
) -> None:
    config = BY_NAME[name].build().config.to_dict()
    with pytest.raises(CheckpointUnusable) as caught:
        read_model(config | change, "config.json")
    assert said in str(caught.value)


@pytest.mark.parametrize("pre", [known.name for known in PRE_TOKENIZERS])
def test_each_way_of_splitting_text_has_llama_cpps_name(pre: str) -> None:
    document = json.loads(byte_level(pre, 300).backend_tokenizer.to_str())
    found = convert_tokenizer(document, {}, 320, "tokenizer.json")
    assert ("tokenizer.ggml.pre", "string", pre) in found.keys


def spm_keys(style: str, change: Any = lambda _: None) -> tuple[dict[str, Any], tuple[str, ...]]:
    document = json.loads(sentencepiece_like(style, 400).backend_tokenizer.to_str())
    change(document)
    found = convert_tokenizer(
        document, {"bos_token": "<s>", "eos_token": "</s>"}, 420, "tokenizer.json"
    )
    return {key: value for key, _, value in found.keys}, found.warnings


def test_merges_become_scores_of_tokens() -> None:
    keys, warnings = spm_keys("llama")
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    types = keys["tokenizer.ggml.token_type"]
    assert keys["tokenizer.ggml.add_space_prefix"] is True and warnings == ()
    assert types[0] == 2 and types[tokens.index("<0x41>")] == 6 and types[1] == 3
    # A token that is merged earlier has the higher score, and one that is not merged the lowest.
    merged = [score for token, score in zip(tokens, scores, strict=True) if score > min(scores)]
    assert merged == sorted(merged, reverse=True) and scores[1] == min(scores)
    assert len(set(merged)) == len(merged) > 30


def test_spaces_in_front_are_reported_where_llama_cpp_adds_others() -> None:
    keys, warnings = spm_keys("mistral")
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    assert any("begins with a space" in text for text in warnings)
    keys, warnings = spm_keys("gemma")
    assert keys["tokenizer.ggml.add_space_prefix"] is False and warnings == ()


def test_merges_that_no_scores_express_are_rejected_or_reported() -> None:
    def drop_one(document: dict[str, Any]) -> None:
        merges = document["model"]["merges"]
        joined = [first + second for first, second in merges]
        twice = next(index for index, token in enumerate(joined) if joined.count(token) > 1)
        del merges[twice]

    _, warnings = spm_keys("llama", drop_one)
    assert any("otherwise with 1 token" in text for text in warnings)

    def reverse(document: dict[str, Any]) -> None:
        document["model"]["merges"] = document["model"]["merges"][::2]

    with pytest.raises(CheckpointUnusable, match="not those of scores"):
        spm_keys("llama", reverse)
    with pytest.raises(CheckpointUnusable, match="byte is missing"):
        spm_keys("llama", lambda document: document["model"]["vocab"].pop("<0x41>"))
    with pytest.raises(CheckpointUnusable, match="ignore_merges"):
        spm_keys("llama", lambda document: document["model"].update(ignore_merges=True))
    with pytest.raises(CheckpointUnusable, match="Metaspace"):
        spm_keys("mistral", lambda document: document["pre_tokenizer"].update(split=True))
