"""The recipe ``seq2seq``: its losses are those of transformers, also of exports; texts and their limits; mistakes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from automodel_ckpt.cli.train import main

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


@pytest.mark.parametrize(
    "name",
    [
        "tied",
        "bart",
        pytest.param("untied", marks=pytest.mark.further),
        pytest.param("t5gemma", marks=pytest.mark.further),
    ],
)
def test_the_loss_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    validation = f"--validation_dataset={{_target_: {BUILDER}, path: {tmp_path / 'rows.jsonl'}}}"
    recipe = write(tmp_path, MODELS[name])
    assert main([str(recipe), "--checkpoint.save_consolidated=every", validation]) == 0
    export = tmp_path / "run" / "epoch_0_step_1" / "model" / "consolidated"
    model = AutoModelForSeq2SeqLM.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    sums, hits, lengths = [], [], []
    for row in rows():
        source = tokenizer(row["source"], return_tensors="pt").input_ids
        labels = tokenizer(row["target"] + tokenizer.eos_token, return_tensors="pt").input_ids
        with torch.no_grad():
            output = model(input_ids=source, labels=labels)
        sums.append(output.loss.item() * labels.numel())
        hits.append((output.logits.argmax(-1) == labels).sum().item())
        lengths.append(labels.numel())
    expected = sum(sums[4:]) / sum(lengths[4:])
    assert losses(tmp_path / "run")[1] == pytest.approx(expected, rel=1e-6)
    first, *_ = (tmp_path / "run" / "validation.jsonl").read_text().splitlines()
    found = json.loads(first)
    assert found["val_loss"] == pytest.approx(sum(sums) / sum(lengths), rel=1e-6)
    assert found["val_accuracy"] == pytest.approx(sum(hits) / sum(lengths))
    assert "val_perplexity" in found


OF_TEXT = (
    "--recipe=llm_finetune",
    "--dataset={_target_: automodel_ckpt.examples.data.mock.random_tokens, seq_length: 8, vocab_size: 300}",
)
# transformers has a class for the decoder of BART alone.
WHOLE = BART.replace("dropout", "architectures: [BartForConditionalGeneration], dropout")


@pytest.mark.parametrize(
    ("model", "options", "hint"),
    [(LLAMA, (), "T5"), (MODELS["tied"], OF_TEXT, "seq2seq"), (WHOLE, OF_TEXT, "seq2seq")],
    ids=["llama", "t5", "bart"],
)
def test_models_of_the_wrong_kind_are_rejected(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    model: str,
    options: tuple[str, ...],
    hint: str,
) -> None:
    assert main([str(write(tmp_path, model)), *options]) == 2
    report = capfd.readouterr().err
    assert "does not support this kind of model" in report
    assert hint in report[report.index("hint:") :]


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
    tmp_path: Path, capfd: pytest.CaptureFixture[str], model: str, setting: str
) -> None:
    assert main([str(write(tmp_path, f"{{{model}}}"))]) == 2
    assert setting in capfd.readouterr().err
