"""GGUF files hold the keys and the tensors that llama.cpp asks for; what it would compute otherwise is refused.

That llama.cpp then gives the same tokens is shown by `make interop`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.convert.formats.gguf.model import read_model
from automodel_ckpt.convert.formats.gguf.positions import rotary_order
from automodel_ckpt.convert.formats.gguf.tokenizer import convert_tokenizer
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models.llamas import LLAMA_3_ROPE, llama_checkpoint
from tests.support.models.shards import bits
from tests.support.models.sizes import model_sizes

Capture = pytest.CaptureFixture[str]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    **model_sizes(vocab=12, hidden=8, inner=6, layers=2, heads=2, kv_heads=1, positions=64),
}
TOKENIZER: dict[str, Any] = {
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "post_processor": None,
    "added_tokens": [{"id": 3, "content": "<s>", "special": True}, {"id": 4, "content": "<u>"}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3}, "merges": [["a", "b"]]},
}
STRANGE = [{"SpecialToken": {"id": "<u>"}}, {"Sequence": {}}]
SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "<s>"}}


def text(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_file_holds_keys_and_tensors(tmp_path: Path, capsys: Capture, tied: bool) -> None:
    gguf = pytest.importorskip("gguf")
    dtype = torch.float32 if tied else torch.bfloat16
    model = llama_checkpoint(tmp_path / "c", tied=tied, dtype=dtype, rope_parameters=LLAMA_3_ROPE)
    assert main(["export", str(tmp_path / "c"), "--to", "gguf"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/c.gguf\n"
    assert main(["export", str(tmp_path / "c"), "--to", "gguf"]) == 4
    assert "--force" in capsys.readouterr().err
    reader = gguf.GGUFReader(tmp_path / "c.gguf")
    for key, value in {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 500_000.0,
        "tokenizer.ggml.pre": "gpt-2",
        "general.file_type": 0 if tied else 32,
        "tokenizer.ggml.eos_token_id": 2,
        "llama.vocab_size": 304,
    }.items():
        assert text(reader, key) == value, key
    tokens, types = text(reader, "tokenizer.ggml.tokens"), text(reader, "tokenizer.ggml.token_type")
    assert (
        len(tokens) == len(types) == 304
        and tokens[303] == "[PAD303]"
        and types[303] == 5
        and types[2] == 3
    )
    found = {tensor.name: tensor for tensor in reader.tensors}
    state = model.state_dict()
    assert found.keys() == {
        tensor.name for tensor in read_model(model.config.to_dict(), "").tensors()
    } | {"rope_freqs.weight"}
    assert ("output.weight" in found) is not tied
    assert np.array_equal(
        found["output_norm.weight"].data, state["model.norm.weight"].float().numpy()
    )
    embedding = found["token_embd.weight"].data
    assert embedding.tobytes() == bits(state["model.embed_tokens.weight"]).tobytes()
    key = state["model.layers.1.self_attn.k_proj.weight"][rotary_order(2, 8)]
    assert found["blk.1.attn_k.weight"].data.tobytes() == bits(key).tobytes()


@pytest.mark.parametrize("is_copy", [True, False], ids=["copy", "other values"])
def test_an_output_layer_that_the_config_ties_is_written_if_it_is_no_copy(
    tmp_path: Path, is_copy: bool
) -> None:
    gguf = pytest.importorskip("gguf")
    llama_checkpoint(tmp_path / "c", tied=True, dtype=torch.float32)
    model = tmp_path / "model"
    assert main(["export", str(tmp_path / "c"), "--to", "hf", "--output", str(model)]) == 0
    (model / "export_manifest.json").unlink()
    (file,) = model.glob("*.safetensors")
    weights = load_file(file)
    head = weights["model.embed_tokens.weight"] * (1 if is_copy else 2)
    former = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(weights | former | {"lm_head.weight": head.clone()}, file)
    (model / "model.safetensors.index.json").unlink()
    file.rename(model / "model.safetensors")
    assert main(["export", str(model), "--to", "gguf"]) == 0
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert ("output.weight" in found) is not is_copy
    if not is_copy:
        assert found["output.weight"].data.tobytes() == bits(head).tobytes()


def test_an_export_ends_with_the_commands_that_serve_it(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("gguf")
    llama_checkpoint(tmp_path / "c", tied=True, dtype=torch.float32)
    target = tmp_path / "my Model.gguf"
    words = ["export", str(tmp_path / "c"), "--to", "gguf", "-o", str(target)]
    assert main(words) == 0
    modelfile = tmp_path / "my Model.Modelfile"
    log = capsys.readouterr().err
    assert f"llama-server -m '{target}'" in log
    assert f"ollama create my-model -f '{modelfile}' && ollama run my-model" in log
    assert modelfile.read_text() == "FROM ./my Model.gguf\n"
    # What a user added to it stays.
    modelfile.write_text("FROM ./my Model.gguf\nPARAMETER temperature 0\n")
    assert main([*words, "--force"]) == 0
    assert "PARAMETER" in modelfile.read_text()
    capsys.readouterr()
    assert main(["export", str(tmp_path / "c"), "-o", str(tmp_path / "hf")]) == 0
    assert f"vllm serve {tmp_path / 'hf'}" in capsys.readouterr().err


def test_without_the_package_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    llama_checkpoint(tmp_path / "c")
    assert main(["export", str(tmp_path / "c"), "--to", "gguf"]) == 2
    assert "automodel_ckpt[gguf]" in capsys.readouterr().err


def test_without_its_side_files_a_model_is_no_gguf(tmp_path: Path, capsys: Capture) -> None:
    pytest.importorskip("gguf")
    llama_checkpoint(tmp_path / "c")
    whole = consolidate(tmp_path / "c", output=tmp_path / "hf").output
    (whole / "tokenizer.json").unlink()
    assert main(["export", str(whole), "--to", "gguf"]) == 3
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["PhiForCausalLM"]}, "PhiForCausalLM"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": LLAMA_3_ROPE | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"num_attention_heads": 3, "head_dim": 4, "num_key_value_heads": 2}, "3, 2 of 4"),
    ],
)
def test_models_that_it_cannot_hold_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointUnusable) as caught:
        read_model(CONFIG | change, "config.json")
    assert said in str(caught.value)


def keys(change: Callable[[dict[str, Any]], object] = lambda _: None) -> dict[str, Any]:
    document = json.loads(json.dumps(TOKENIZER))
    change(document)
    return {
        key: value
        for key, _, value in convert_tokenizer(
            document, SETTINGS, 6, "tokenizer.json", "{{ x }}"
        ).keys
    }


@pytest.mark.parametrize(
    ("settings", "template"), [({"bos_token": "\ud800"}, None), ({}, "{{ \udc80 }}")]
)
def test_text_that_no_file_can_hold_is_refused(
    settings: dict[str, Any], template: str | None
) -> None:
    with pytest.raises(CheckpointUnusable, match="not valid Unicode"):
        convert_tokenizer(TOKENIZER, settings, 6, "tokenizer.json", template)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["model"].update(type="Unigram"), "Unigram"),
        (lambda d: d["model"].update(byte_fallback=True), "<0x00>"),
        (lambda d: d["model"].update(dropout=0.1), "dropout"),
        (lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (lambda d: d["model"].update(ignore_merges=True), "ignore_merges"),
        (lambda d: d["model"]["vocab"].update(far=99), "far"),
        (
            lambda d: d.update(post_processor={"type": "TemplateProcessing", "single": STRANGE}),
            "other tokens",
        ),
        (lambda d: d.update(added_tokens=["x"]), "not a tokenizer"),
    ],
)
def test_tokenizers_that_llama_cpp_would_not_follow_are_refused(
    change: Callable[[dict[str, Any]], object], said: str
) -> None:
    with pytest.raises(CheckpointUnusable) as caught:
        keys(change)
    assert said in str(caught.value)
