"""Recipes of axolotl, LLaMA-Factory and TRL: --convert-recipe prints ones that load, and reports the other keys."""

import json
import re
from pathlib import Path

import pytest
import yaml

from automodel_ckpt import load_recipe
from automodel_ckpt.cli.train import main

AXOLOTL = """\
base_model: org/base
model_type: LlamaForCausalLM
load_in_4bit: true
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: turns
    roles_to_train: [assistant]
  - path: alpaca.jsonl
    type: alpaca
    shards: 4
chat_template: chatml
val_set_size: 0.05
output_dir: ./out
adapter: qlora
sequence_len: 4096
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project: mine
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 2
optimizer: paged_adamw_8bit
lr_scheduler: one_cycle
learning_rate: 2e-4
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
evals_per_epoch: 4
saves_per_epoch: 1
save_steps: 0.2
weight_decay: 0.1
deepspeed: zero3.json
special_tokens: {pad_token: "<pad>"}
"""
FACTORY = """\
model_name_or_path: org/base
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
dataset: known,unknown
template: llama3
cutoff_len: 1024
max_samples: 100
output_dir: saves/sft
save_only_model: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
fp16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 50
deepspeed: ds_z3_config.json
"""
TRL = """\
model_name_or_path: org/base
dataset_name: org/data
use_peft: true
lora_r: 32
max_length: 512
learning_rate: 2.0e-4
num_train_epochs: 1
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
eos_token: "<|im_end|>"
report_to: [tensorboard]
output_dir: out
"""
CASES = {
    "axolotl": (
        AXOLOTL,
        [],
        {
            "model.attn_implementation": "flash_attention_2",
            "model.activation_checkpointing": True,
            "peft.quantize_base": "nf4",
            "peft.target_modules": "all-linear",
            "peft.dropout": 0.05,
            "dataset.sources.set0.messages_field": "turns",
            "dataset.sources.set0.split": "train[:95%]",
            "dataset.sources.set1.completion_field": "output",
            "dataset.sources.set1.truncation": "skip",
            "validation_dataset.sources.set0.split": "train[95%:]",
            "packed_sequence.size": 4096,
            "optimizer._target_": "automodel_ckpt.optim.adam8bit.AdamW8bit",
            "optimizer.lr": 2e-4,
            "optimizer.weight_decay": 0.1,
            "lr_scheduler.name": "cosine",
            "lr_scheduler.warmup_ratio": 0.03,
            "step_scheduler.global_batch_size": 32,
            "step_scheduler.num_epochs": 2,
        },
        [
            "datasets.1.shards 4: no equivalent",
            "special_tokens: no equivalent",
            "lr_scheduler one_cycle: no equivalent (lr_scheduler.name must be",
            "save_steps 0.2: no equivalent (step_scheduler.ckpt_every_steps must be",
            "evals_per_epoch 4: set step_scheduler.val_every_steps",
            "chat_template chatml: the tokenizer's own is used",
            "deepspeed zero3.json: several ranks shard the model by FSDP2",
            "wandb_project mine: here: logging.trackers ({wandb: {project: mine}})",
            "2 x 4 accumulated x 4 ranks",
        ],
    ),
    "axolotl, all in bfloat16": (
        AXOLOTL.replace("bf16: auto", "bf16: full"),
        [],
        {"distributed.mixed_precision": "bfloat16"},
        ["bf16 full: weights stay in float32"],
    ),
    "LLaMA-Factory": (
        FACTORY,
        [],
        {
            "recipe": "llm_finetune",
            "model.trust_remote_code": True,
            "peft.r": 16,
            "peft.alpha": 32,
            "peft.target_modules": ["q_proj", "v_proj"],
            "dataset.sources.set0.path": "data/known.jsonl",
            "dataset.sources.set0.prompt_field": "{{ ask }}",
            "dataset.sources.set0.completion_field": "answer",
            "dataset.sources.set0.as_chat": True,
            "dataset.sources.set0.max_samples": 100,
            "dataset.sources.set1.path": "data/unknown.json",
            "distributed.mixed_precision": "bfloat16",
            "lr_scheduler.warmup_ratio": 0.1,
            "step_scheduler.num_epochs": 3,
            "step_scheduler.val_every_steps": 50,
            "checkpoint.save_optimizer": False,
        },
        [
            "unknown: not in data/dataset_info.json",
            "template llama3: the tokenizer's own is used",
            "fp16 true: float16 needs a loss scaler",
            "trust_remote_code: also needs --trust trust_remote_code",
        ],
    ),
    "TRL": (
        TRL,
        [],
        {
            "peft.alpha": 32,
            "peft.target_modules": ["q_proj", "v_proj"],
            "dataset.seq_length": 512,
            "dataset.truncation": "right",
            "optimizer.weight_decay": 0.0,
            "lr_scheduler.name": "linear",
        },
        [
            "recipe: sft, because TRL's files do not state it",
            "assistant_only_loss false: prompts have labels there",
            "eos_token '<|im_end|>': no equivalent",
        ],
    ),
    "TRL, DPO": (
        TRL.replace("learning_rate: 2.0e-4", "beta: 0.3\nloss_type: ipo"),
        ["--recipe", "dpo"],
        {"recipe": "dpo", "dpo.beta": 0.3, "dpo.loss": "ipo", "optimizer.lr": 1e-6},
        [],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_of_another_program_becomes_one_that_loads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, words, expected, reported = CASES[name]
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    columns = {"prompt": "ask", "response": "answer"}
    info = {"known": {"file_name": "known.jsonl", "columns": columns}}
    Path("data/dataset_info.json").write_text(json.dumps(info))
    Path("theirs.yaml").write_text(text)
    assert main(["--convert-recipe", "theirs.yaml", "--nproc-per-node", "4", *words]) == 0
    converted = capsys.readouterr().out
    Path("ours.yaml").write_text(converted)
    assert main(["--print-config", "ours.yaml"]) == 0
    recipe = load_recipe("ours.yaml")
    shown = yaml.safe_load(capsys.readouterr().out)
    for key, value in expected.items():
        found = shown
        for part in key.split("."):
            found = found[part]
        assert found == value or (isinstance(value, float) and float(found) == value), key
    for line in reported:
        assert line in converted
    # No key is dropped without a word.
    for key in yaml.safe_load(text):
        assert re.search(rf"\b{key}\b", converted), key
    assert recipe.config.step_scheduler.local_batch_size == (1 if "Factory" in name else 2)
    capsys.readouterr()
    assert main(["theirs.yaml"]) == 2
    error = capsys.readouterr().err
    assert f"this is a recipe of {name.partition(',')[0]}" in error
    assert "ckpt-train --convert-recipe theirs.yaml" in error


def test_what_cannot_be_converted_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(AXOLOTL + "rl: grpo\n")
    assert main(["--convert-recipe", "theirs.yaml"]) == 2
    assert "rl: no such training" in capsys.readouterr().err
    Path("theirs.yaml").write_text(AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: x"))
    assert main(["--convert-recipe", "theirs.yaml"]) == 2
    assert "must be a number" in capsys.readouterr().err
    one = re.sub(r"(?s)datasets:.*?\nchat_", "datasets: {path: chats.jsonl}\nchat_", AXOLOTL)
    Path("one.yaml").write_text(one)
    assert main(["--convert-recipe", "one.yaml"]) == 2
    assert "datasets must be a list" in capsys.readouterr().err
    Path("part.yaml").write_text(AXOLOTL.replace("num_epochs: 2", "num_epochs: 0.5"))
    assert main(["--convert-recipe", "part.yaml"]) == 0
    text = capsys.readouterr().out
    assert "num_epochs 0.5: set step_scheduler.max_steps" in text
    assert "num_epochs" not in yaml.safe_load(text)["step_scheduler"]
    assert main(["--convert-recipe", "theirs.yaml", "--optimizer.lr", "1"]) == 2
    assert "only recipe can be overridden here" in capsys.readouterr().err
