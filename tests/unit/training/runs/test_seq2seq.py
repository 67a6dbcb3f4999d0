"""The recipe ``seq2seq``: its losses are those of transformers, also of exports; texts and their limits; mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
)

from automodel_ckpt.data.seq2seq import SourceTargetCollator, source_target
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.examples.data.python_docs import train_tokenizer
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.recipes.seq2seq import Seq2Seq
from tests.support.runs.training import build

T5 = "{model_type: t5, d_model: 16, d_kv: 4, d_ff: 32, num_layers: 1, num_heads: 2, dropout_rate: 0.0%s}"
BART = (
    "{model_type: bart, d_model: 16, encoder_layers: 1, decoder_layers: 1, encoder_attention_heads: 2,"
    " decoder_attention_heads: 2, encoder_ffn_dim: 32, decoder_ffn_dim: 32, dropout: 0.0,"
    " max_position_embeddings: 64}"
)
PART = (
    "{model_type: t5_gemma_module, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,"
    " num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, vocab_size: 300, query_pre_attn_scalar: 8}"
)
T5GEMMA = f"{{model_type: t5gemma, dropout_rate: 0.0, encoder: {PART}, decoder: {PART}}}"
MODELS = {
    "tied": T5 % "",
    "untied": T5 % ", feed_forward_proj: gated-gelu, tie_word_embeddings: false",
    "bart": BART,
    "t5gemma": T5GEMMA,
}
BUILDER = "automodel_ckpt.data.seq2seq.source_target"
LLAMA = "{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"


def rows() -> list[dict[str, str]]:
    found = []
    for number in range(8):
        source = f"the number {number}" + " again" * (number % 3)
        found.append({"source": source, "target": f"{number}" + " yes" * (number % 4)})
    return found


def write(directory: Path, model: str) -> Path:
    data = directory / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows())))
    recipe = directory / "recipe.yaml"
    recipe.write_text(f"""
recipe: seq2seq
model:
  from_config: {model}
tokenizer:
  _target_: automodel_ckpt.examples.data.python_docs.train_tokenizer
  vocab_size: 300
dataset:
  _target_: {BUILDER}
  path: {data}
dataloader:
  shuffle: false
optimizer:
  lr: 1e-2
step_scheduler:
  global_batch_size: 4
  local_batch_size: 2
  max_steps: 2
  ckpt_every_steps: 1
checkpoint:
  checkpoint_dir: {directory / "run"}
""")
    return recipe


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "training.jsonl").read_text().splitlines())
    return [record["loss"] for record in lines if "event" not in record]


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    recipe = build(
        write(tmp_path, MODELS[name]),
        "--checkpoint.save_consolidated=every",
        f"--validation_dataset={{_target_: {BUILDER}, path: {tmp_path / 'rows.jsonl'}}}",
        recipe_class=Seq2Seq,
    )
    recipe.setup()
    recipe.run()
    samples = [recipe.dataloader.dataset[number] for number in range(8)]
    recipe.close()
    export = tmp_path / "run" / "epoch_0_step_1" / "model" / "consolidated"
    model = AutoModelForSeq2SeqLM.from_pretrained(export).eval()
    sums, hits, lengths = [], [], []
    for sample in samples:
        labels = torch.tensor([sample["labels"]])
        with torch.no_grad():
            output = model(input_ids=torch.tensor([sample["input_ids"]]), labels=labels)
        sums.append(output.loss.item() * labels.numel())
        hits.append((output.logits.argmax(-1) == labels).sum().item())
        lengths.append(labels.numel())
    expected = sum(sums[4:]) / sum(lengths[4:])
    assert losses(tmp_path / "run")[1] == pytest.approx(expected, rel=1e-6)
    first, *_ = (tmp_path / "run" / "validation.jsonl").read_text().splitlines()
    validation = json.loads(first)
    assert validation["val_loss"] == pytest.approx(sum(sums) / sum(lengths), rel=1e-6)
    assert validation["val_accuracy"] == pytest.approx(sum(hits) / sum(lengths))
    assert "val_perplexity" in validation


def test_texts_have_limits_and_end_tokens(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(vocab_size=300)
    path = tmp_path / "rows.jsonl"
    content = [{"source": "a b", "target": "c"}, {"source": "d", "target": "e f g h i j"}]
    path.write_text("\n".join(map(json.dumps, [*content, {"source": "k", "target": ""}])))
    end = tokenizer.eos_token_id
    samples = list(source_target(tokenizer, str(path), source_prompt="x "))
    assert tokenizer.decode(samples[0]["input_ids"], skip_special_tokens=True) == "x a b"
    for sample in samples:
        assert sample["labels"][-1] == end
        assert sample["labels"].count(end) == 1
    assert samples[2]["labels"] == [end]
    with pytest.raises(RecipeError, match="a target is longer than target_length") as error:
        source_target(tokenizer, str(path), target_length=4)
    assert "rows.jsonl:2 (" in error.value.problems[0].where
    cut = source_target(tokenizer, str(path), target_length=4, truncation="right")
    assert len(cut[1]["labels"]) == 4
    assert cut[1]["labels"][-1] == end
    assert len(source_target(tokenizer, str(path), target_length=4, truncation="skip")) == 2
    limits: dict[str, Any] = {"seq_length": 5, "target_length": 4, "streaming": True}
    for truncation in ("right", "skip"):
        stream = source_target(tokenizer, str(path), truncation=truncation, **limits)
        made = [stream.prepare(row) for row in stream]
        assert made[0]["labels"] == samples[0]["labels"]
        assert made[1]["labels"] == (cut[1]["labels"] if truncation == "right" else [])
        assert SourceTargetCollator(0)(made)["input_ids"].shape[0] == 3
    batch = SourceTargetCollator(0)([{"input_ids": [5, 6], "labels": [7]}, cut[1]])
    assert batch["labels"][0].tolist() == [7, -100, -100, -100]
    assert batch["attention_mask"].sum().item() == 2 + len(cut[1]["input_ids"])
    with pytest.raises(RecipeError, match="a source without tokens"):
        SourceTargetCollator(0)([{"input_ids": [], "labels": [1]}])


@pytest.mark.parametrize(
    ("template", "start", "labels", "cut"),
    [
        # BART starts with the end token; T5Gemma's tokenizer adds the start token and no end token; T5.
        ("<s> $A </s>", 1, [2, 4, 5, 6, 1], [2, 4, 1]),
        ("<s> $A", 2, [4, 5, 6, 1], [4, 5, 1]),
        ("$A </s>", 0, [4, 5, 6, 1], [4, 5, 1]),
    ],
)
def test_targets_have_one_start_and_an_end(
    tmp_path: Path, template: str, start: int, labels: list[int], cut: list[int]
) -> None:
    words = ["<pad>", "</s>", "<s>", "<unk>", "a", "b", "c"]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", 2), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"source": "a", "target": "a b c"}))
    whole = source_target(tokenizer, str(path), start_token_id=start)
    assert next(iter(whole))["labels"] == labels
    shorter = source_target(
        tokenizer, str(path), start_token_id=start, target_length=3, truncation="right"
    )
    assert next(iter(shorter))["labels"] == cut


def test_models_of_the_wrong_kind_are_rejected(tmp_path: Path) -> None:
    recipe = build(write(tmp_path, LLAMA), recipe_class=Seq2Seq)
    with pytest.raises(RecipeError, match="does not support this kind of model") as error:
        recipe.setup()
    recipe.close()
    assert "T5" in error.value.problems[0].hint
    recipe = build(write(tmp_path, MODELS["tied"]), recipe_class=LLMFinetune)
    with pytest.raises(RecipeError, match="does not support this kind of model") as error:
        recipe.setup()
    recipe.close()
    assert "recipe: seq2seq" in error.value.problems[0].hint
    # transformers has a class for the decoder of BART alone.
    whole = BART.replace("dropout", "architectures: [BartForConditionalGeneration], dropout")
    recipe = build(write(tmp_path, whole), recipe_class=LLMFinetune)
    with pytest.raises(RecipeError, match="does not support this kind of model") as error:
        recipe.setup()
    recipe.close()
    assert "recipe: seq2seq" in error.value.problems[0].hint


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ("model_type: m2m_100", "model.config_overrides: {encoder_layerdrop: 0.0"),
        (
            "model_type: nllb-moe, encoder_layerdrop: 0, decoder_layerdrop: 0",
            "model.config_overrides: {moe_eval_capacity",
        ),
        ("model_type: prophetnet", "such as BART"),
    ],
)
def test_models_whose_passes_are_not_alike_are_rejected(
    tmp_path: Path, model: str, setting: str
) -> None:
    recipe = build(write(tmp_path, f"{{{model}}}"), recipe_class=Seq2Seq)
    with pytest.raises(RecipeError) as error:
        recipe.setup()
    recipe.close()
    assert setting in error.value.problems[0].hint
