"""The side files: the base's own bytes where there is a base, transformers' where there is none."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from automodel_ckpt.checkpoint.export.hf_assets import HFAssets
from automodel_ckpt.checkpoint.sources.source import MAPS, read_maps
from automodel_ckpt.errors import RecipeError
from tests.support.models import vision
from tests.support.models.shards import write_assets
from tests.support.models.sizes import model_sizes


def model_of(*, tied: bool = False, vocab_size: int = 32) -> Any:
    config = LlamaConfig(
        **model_sizes(vocab=vocab_size, hidden=16, inner=24, layers=1, heads=2),
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def tokenizer_of() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    model_of(tied=True).save_pretrained(directory, max_shard_size="2KB")
    tokenizer_of().save_pretrained(directory)
    # Spelled as no library would write it, to tell a copy from a rewrite.
    for name in ("tokenizer_config.json", "generation_config.json"):
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()), indent=7) + "\n\n")
    (directory / "special_tokens_map.json").write_text('{"unk_token":  "[UNK]"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "modeling_own.py").write_text("# code\n")
    (directory / "README.md").write_text("not needed")
    return directory


def written(assets: HFAssets, directory: Path) -> set[str]:
    assets.validate()
    write_assets(assets, directory)
    return {path.name for path in directory.iterdir()}


def test_with_a_base_its_files_are_copied_byte_for_byte(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    assets = HFAssets.from_model(
        model, tokenizer=AutoTokenizer.from_pretrained(base), base_dir=base
    )
    names = written(assets, tmp_path / "m")
    copied = {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "modeling_own.py",
    }
    assert names == copied | {"config.json"} | MAPS
    for name in copied:
        assert (tmp_path / "m" / name).read_bytes() == (base / name).read_bytes(), name
    config = json.loads((tmp_path / "m" / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"


def test_the_maps_are_the_bases(base: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base).float()
    assets = HFAssets.from_model(model, base_dir=base)
    written(assets, tmp_path / "m")
    maps = read_maps(tmp_path / "m")
    index = json.loads((base / "model.safetensors.index.json").read_bytes())["weight_map"]
    files = sorted(set(index.values()))
    assert len(files) > 1 and maps.file_index == {
        fqn: files.index(name) + 1 for fqn, name in index.items()
    }
    assert maps.file_index == assets.file_index_mapping and maps.dtype == dict.fromkeys(
        index, "BF16"
    )
    assert "lm_head.weight" not in index and maps.names == frozenset(index)
    assert assets.maps == maps


def test_without_a_base_transformers_writes_the_files(tmp_path: Path) -> None:
    model = model_of()
    model.config.dtype = None
    names = written(HFAssets.from_model(model, tokenizer=tokenizer_of()), tmp_path / "m")
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    assert AutoTokenizer.from_pretrained(tmp_path / "m").encode("b a") == [2, 1]
    assert json.loads((tmp_path / "m" / "config.json").read_bytes())["dtype"] == "bfloat16"
    maps = read_maps(tmp_path / "m")
    assert maps.file_index and set(maps.file_index.values()) == {1} and maps.dtype is None
    assert HFAssets.from_model(model_of(), tokenizer=tokenizer_of()).maps == maps


def test_a_tokenizer_that_was_changed_is_written_not_copied(base: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["new"])
    written(
        HFAssets.from_model(model_of(tied=True), tokenizer=tokenizer, base_dir=base), tmp_path / "m"
    )
    assert "new" in AutoTokenizer.from_pretrained(tmp_path / "m").get_vocab()


def test_an_invalid_generation_config_is_found_before_training(tmp_path: Path) -> None:
    model = model_of()
    model.generation_config = GenerationConfig(do_sample=False)
    model.generation_config.temperature = 0.5
    with pytest.raises(RecipeError, match="temperature"):
        HFAssets.from_model(model).validate()


def test_differences_from_the_base_are_told_and_expected(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "automodel_ckpt"):
        written(HFAssets.from_model(model_of(vocab_size=48), base_dir=base), tmp_path / "m")
    assert "in the names or shapes of 2 tensors: " in caplog.text
    assert "lm_head.weight" in caplog.text and "model.embed_tokens.weight" in caplog.text
    maps = read_maps(tmp_path / "m")
    assert maps.shape is not None and maps.shape["lm_head.weight"] == (48, 16)


def test_a_backbone_without_the_prefix_of_the_base_is_no_difference(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    backbone = AutoModelForCausalLM.from_pretrained(base).model
    written(HFAssets.from_model(backbone, base_dir=base), tmp_path / "m")
    assert caplog.messages == []


def test_a_damaged_base_file_is_named(base: Path) -> None:
    name = sorted(base.glob("*.safetensors"))[0]
    name.write_bytes(name.read_bytes()[:-1])
    with pytest.raises(RecipeError, match=name.name):
        HFAssets.from_model(model_of(tied=True), base_dir=base).validate()


@pytest.mark.parametrize("change", ["template", "setting"])
def test_a_processor_that_was_changed_is_written_not_copied(tmp_path: Path, change: str) -> None:
    _, made = vision.llava()
    base = tmp_path / "base"
    made.save_pretrained(base)
    processor = type(made).from_pretrained(base)
    for path in base.glob("*.json"):  # spelled as no library would write it
        path.write_text(path.read_text() + "\n\n")
    unchanged = {path.name: path.read_bytes() for path in base.iterdir()}
    written(HFAssets.from_model(model_of(), tokenizer=processor, base_dir=base), tmp_path / "same")
    copied = {name: (tmp_path / "same" / name).read_bytes() for name in unchanged}
    assert copied == unchanged
    if change == "template":
        processor.chat_template = "{{ changed }}"
    else:
        processor.patch_size = 7
    written(HFAssets.from_model(model_of(), tokenizer=processor, base_dir=base), tmp_path / "m")
    again = type(processor).from_pretrained(tmp_path / "m")
    assert again.chat_template == processor.chat_template
    assert again.patch_size == processor.patch_size


def test_a_tokenizer_whose_files_were_damaged_since_is_written_from_memory(
    base: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    (base / "tokenizer.json").write_text("{")
    written(
        HFAssets.from_model(model_of(tied=True), tokenizer=tokenizer, base_dir=base), tmp_path / "m"
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "m").encode("b a") == [2, 1]
