"""Recipes of NeMo AutoModel: each row of the mapping, overrides in both spellings, and the converted file.

The recipes are written here, in AutoModel's format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Template

from automodel_ckpt import load_recipe
from automodel_ckpt.errors import RecipeError
from tests.support.runs import printed

DATA = "nemo_automodel.components.datasets"
LLM = "recipe: TrainFinetuneRecipeForNextTokenPrediction\n"
VLM = "recipe: FinetuneRecipeForVLM\n"
MODEL = """\
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: some/model
"""
ROWS = f"""\
dataset:
  _target_: {DATA}.llm.hellaswag.HellaSwag
  path_or_dataset: rows.jsonl
"""
COLUMNS = (
    f"dataset:\n  _target_: {DATA}.llm.column_mapped_text_instruction_dataset."
    "ColumnMappedTextInstructionDataset\n  path_or_dataset_id: rows.jsonl\n"
)
SQUAD = f"""\
dataset:
  _target_: {DATA}.llm.squad.make_squad_dataset
  dataset_name: rows.jsonl
"""
CHAT = f"""\
dataset:
  _target_: {DATA}.llm.chat_dataset.ChatDataset
  path_or_dataset_id: rows.jsonl
"""
AGENT = f"""\
dataset:
  _target_: {DATA}.llm.agent_chat.make_agent_chat_dataset
  dataset_name: some/conversations
"""
MEGATRON = f"""\
dataset:
  _target_: {DATA}.llm.megatron_dataset.MegatronPretraining
  paths: data/web_*
"""
NANOGPT = f"""\
dataset:
  _target_: {DATA}.llm.nanogpt_dataset.NanogptDataset
  file_pattern: data/web_*.bin
"""
MEDPIX = f"""\
dataset:
  _target_: {DATA}.vlm.datasets.make_medpix_dataset
  path_or_dataset: some/images
"""
QWEN = """\
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  config:
    _target_: transformers.models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig
    hidden_size: 16
"""
VALIDATION = f"""\
validation_dataset:
  _target_: {DATA}.llm.hellaswag.HellaSwag
  path_or_dataset: rows.jsonl
"""
TE_ADAM = "transformer_engine.pytorch.optimizers.FusedAdam"
PEFT = """\
peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
"""


def load(tmp_path: Path, text: str, *words: str) -> Any:
    """Load a recipe that consists of *text* and of the sections that it does not have."""
    rows = MEDPIX if VLM in text or VLM_KD in text else ROWS
    for section, default in (("recipe:", LLM), ("model:", MODEL), ("dataset:", rows)):
        if not text.startswith(section) and f"\n{section}" not in text:
            text += default
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text(text)
    loaded = printed.load(recipe, *words)
    if not words:
        assert dropped_values(loaded) == []
    return loaded


IMPLIED = (
    "_target_", "align_to_bos", "context", "enabled", "filter_overlong", "load_in_4bit", "match_all_linear",
    "neftune", "question", "torch_dtype", "truncate", "truncate_history", "truncation",
)  # fmt: skip
"""Keys that our other keys imply."""


def dropped_values(loaded: Any) -> list[str]:
    """The keys of an accepted file that are neither in the recipe nor named in a notice."""
    if loaded.translated is None:
        return []
    kept = set(origins(loaded.translated))
    named = {notice.key.partition(" ")[0] for notice in loaded.notices}
    dropped = []
    for key, node in leaves(loaded.parsed):
        parts = key.split(".")
        above = {".".join(parts[:number]) for number in range(1, len(parts) + 1)}
        is_implied = parts[0] == "recipe" or parts[-1] in IMPLIED
        if node.origin not in kept and not above & named and not is_implied:
            dropped.append(key)
    return dropped


def value_at(loaded: Any, key: str) -> Any:
    value: Any = loaded.config
    for part in key.split("."):
        if isinstance(value, dict):
            value = value[part]
        else:
            inner = getattr(value, "kwargs", {})
            value = inner[part] if part in inner else getattr(value, part)
    return value


def reported(loaded: Any) -> list[str]:
    """The comments at the top of the converted file: what the translation dropped or changed."""
    return [line[2:] for line in loaded.converted().splitlines() if line.startswith("# ")]


KD = "recipe: KnowledgeDistillationRecipeForNextTokenPrediction\n"
TEACHER = """\
teacher_model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: some/teacher
"""
KD_LOSS = """\
kd_ratio: 0.25
offload_teacher_model: true
kd_loss_fn:
  _target_: nemo_automodel.components.loss.kd_loss.KDLoss
  ignore_index: -100
  temperature: 3
"""
DISTILLED = f"{KD}{TEACHER}{KD_LOSS}"
VLM_KD = "recipe: KnowledgeDistillationRecipeForVLM\n"
VLM_TEACHER = TEACHER.replace("CausalLM", "ImageTextToText")
VLM_DISTILLED = f"{VLM_KD}{VLM_TEACHER}{KD_LOSS}freeze_config:\n  freeze_vision_tower: true\n"
QAT = (
    "qat:\n  enabled: true\n  fake_quant_after_n_steps: 1\n  qat_config:\n"
    "    _target_: nemo_automodel.components.quantization.qat.QATConfig\n"
    "    quantizer_type: int4_weight_only\n    groupsize: 256\n"
)
PIPELINE = "distributed:\n  pp_size: 2\n  pipeline:\n    pp_schedule: interleaved1f1b\n"
TRANSLATED: list[tuple[str, dict[str, Any]]] = [
    ("distributed:\n  strategy: megatron-fsdp\n", {"distributed.strategy": "auto"}),
    ("distributed:\n  enable_compile: true\n", {"compile.enabled": True}),
    ("distributed:\n  enable_compile: false\n", {"compile.enabled": False}),
    (
        MODEL + "  router_aux_loss_coef: 0.5\n",
        {
            "model.config_overrides": {"router_aux_loss_coef": 0.5, "output_router_logits": True},
            "model.router_aux_loss": "micro_batch",
        },
    ),
    (
        MODEL + "  router_aux_loss_coef: 0.0\n",
        {"model.config_overrides": {"router_aux_loss_coef": 0.0}},
    ),
    (
        f"dataset:\n  _target_: {DATA}.llm.ChatDataset\n  path_or_dataset_id: rows.jsonl\n",
        {"dataset._target_": "automodel_ckpt.data.chat.messages"},
    ),
    (
        (
            f"dataset:\n  _target_: {DATA}.llm.column_mapped_text_instruction_iterable_dataset."
            "ColumnMappedTextInstructionIterableDataset\n  path_or_dataset_id: rows.jsonl\n"
            "  column_mapping:\n    question: q\n    answer: a\n"
        ),
        {"dataset.streaming": True, "dataloader.shuffle": False},
    ),
    (
        f"{VLM}{CHAT}  tokenizer:\n    pretrained_model_name_or_path: another\n",
        {
            "dataset._target_": "automodel_ckpt.data.vlm.conversations",
            "tokenizer.from_pretrained": None,
        },
    ),
    (f"{VLM}{CHAT}  mask_history: true\n", {"dataset.learn": "last"}),
    (
        "step_scheduler:\n  log_remote_every_steps: 5\nwandb:\n  project: p\n",
        {"logging.log_every_steps": 5},
    ),
    ("step_scheduler:\n  log_remote_every_steps: 5\n", {"logging.log_every_steps": None}),
    (
        MEGATRON + "step_scheduler:\n  max_steps: 3\n",
        {"step_scheduler.num_epochs": None, "step_scheduler.ckpt_every_epochs": None},
    ),
    (
        MEGATRON,
        {
            "step_scheduler.ckpt_every_epochs": 1,
            "dataset._target_": "automodel_ckpt.data.token_files.megatron",
            "dataset.path": "data/web_*",
            "dataset.split": "900, 50, 50",
            "dataset.seq_length": 2048,
        },
    ),
    (LLM, {"recipe": "llm_finetune"}),
    (
        DISTILLED,
        {
            "recipe": "distill",
            "distill.teacher.from_pretrained": "some/teacher",
            "distill.teacher.dtype": "auto",
            "distill.divergence": "forward_kl",
            "distill.kd_ratio": 0.25,
            "distill.temperature": 3.0,
            "distill.offload_teacher": True,
        },
    ),
    (
        VLM_DISTILLED,
        {
            "recipe": "vlm_distill",
            "model.freeze_if_present": ["*vision*.*", "*visual*.*", "*image_encoder*.*"],
        },
    ),
    (VLM, {"recipe": "vlm_finetune"}),
    (QAT, {"qat.scheme": "W4A16", "qat.group_size": 256, "qat.start_step": 1}),
    ("qat:\n  enabled: true\n", {"qat.scheme": "W4A8"}),
    ("qat:\n  enabled: false\n  fake_quant_after_n_steps: 1\n", {"qat": None}),
    ("tool_call_eval: null\n", {"evaluation": None}),
    ("rng:\n  seed: 1111\n  ranked: true\n", {"seed": 1111}),
    ("rng:\n  deterministic: true\n", {"deterministic": True}),
    ("dist_env:\n  backend: nccl\n", {"distributed.backend": None}),
    ("dist_env:\n  backend: gloo\n", {"distributed.backend": "gloo"}),
    ("dist_env:\n  timeout_minutes: 5\n", {"distributed.timeout_minutes": 5.0}),
    (
        "",
        {
            "model.from_pretrained": "some/model",
            "model.dtype": "auto",
            "dataset._target_": "automodel_ckpt.data.hellaswag.hellaswag",
            "dataset.seq_length": None,
            "dataset.truncation": "right",
            "lr_scheduler": None,
            "clip_grad_norm": 1.0,
            "step_scheduler.global_batch_size": 32,
            "step_scheduler.ckpt_every_steps": 100,
        },
    ),
    (MODEL + "  torch_dtype: torch.bfloat16\n", {"model.dtype": "bfloat16"}),
    (
        "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config\n  config: some/model\n",
        {"model.from_config": "some/model"},
    ),
    (
        (
            "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config\n  config:\n"
            "    _target_: transformers.models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig\n"
            "    hidden_size: 16\n"
        ),
        {"model.from_config": {"model_type": "qwen3_moe", "hidden_size": 16}},
    ),
    ("distributed:\n  activation_checkpointing: true\n", {"model.activation_checkpointing": True}),
    (
        "distributed:\n  activation_checkpointing: selective\n",
        {"model.activation_checkpointing": "selective"},
    ),
    ("distributed:\n  strategy: ddp\n", {"distributed.mixed_precision": "none"}),
    (
        "distributed:\n  strategy: ddp\n  autocast_dtype: torch.bfloat16\n",
        {"distributed.mixed_precision": "bfloat16"},
    ),
    (
        (
            "distributed:\n  mp_policy:\n    _target_: torch.distributed.fsdp.MixedPrecisionPolicy\n"
            "    param_dtype: float32\n"
        ),
        {"distributed.mixed_precision": None},
    ),
    (
        VLM + MEDPIX + PIPELINE + "    pp_microbatch_size: 2\n",
        {"distributed.pp_size": 1, "step_scheduler.local_batch_size": 2},
    ),
    (
        "distributed:\n  pp_size: 2\n  pipeline:\n    pp_schedule: interleaved1f1b\n",
        {"distributed.pp_schedule": "1f1b"},
    ),
    (
        VLM + MEDPIX + "packed_sequence:\n  pack_size: 64\n  max_length: 32\n",
        {"packed_sequence.size": 64, "dataset.seq_length": 32},
    ),
    (
        VLM + MEDPIX + "packed_sequence:\n  pack_size: 64\n  drop_long_samples: true\n",
        {"dataset.truncation": "skip"},
    ),
    (PEFT + "  dim: 4\n", {"peft.r": 4}),
    (PEFT, {"peft.alpha": 32, "peft.target_modules": ["*_proj"]}),
    (
        PEFT + "  target_modules: ['*']\n",
        {"peft.target_modules": "all-linear", "peft.target_parameters": "all-experts"},
    ),
    (
        PEFT + "  exclude_modules: ['*lm_head*']\n",
        {"peft.exclude_if_present": ["*lm_head*"], "peft.exclude_modules": []},
    ),
    (
        VLM + PEFT + "  exclude_modules: ['*visual*', '*.head']\n"
        "freeze_config:\n  freeze_vision_tower: true\n  freeze_audio_tower: true\n",
        {
            "peft.exclude_if_present": [
                "*visual*",
                "*.head",
                "*vision*",
                "*image_encoder*",
                "*audio*",
                "*speech*",
                "*sound*",
            ]
        },
    ),
    (
        VLM + PEFT + "freeze_config:\n  freeze_embeddings: true\n",
        {"peft.exclude_if_present": ["*vision*", "*visual*", "*image_encoder*"]},
    ),
    (VLM + PEFT, {"peft.exclude_if_present": []}),
    (
        PEFT + "quantization:\n  load_in_4bit: true\n  bnb_4bit_quant_type: nf4\n",
        {"peft.quantize_base": "nf4"},
    ),
    (PEFT + "quantization:\n  load_in_8bit: true\n", {"peft.quantize_base": "int8"}),
    ("checkpoint:\n  max_recent_checkpoints: 3\n", {"checkpoint.keep_last": 3}),
    ("step_scheduler:\n  num_epochs: null\n", {"step_scheduler.num_epochs": 10}),
    (f"optimizer:\n  _target_: {TE_ADAM}\n  lr: 1e-5\n", {"optimizer.weight_decay": 0.0}),
    (
        f"optimizer:\n  _target_: {TE_ADAM}\n  weight_decay: 0.1\n  adam_w_mode: false\n",
        {"optimizer._target_": "torch.optim.Adam"},
    ),
    (
        VALIDATION + "checkpoint:\n  best_metric_key: default\n",
        {"checkpoint.best_metric_key": "val_loss"},
    ),
    (VLM + MEDPIX + "  max_length: 512\n", {"dataset.seq_length": 512}),
    (ROWS + "  num_samples_limit: 5\n", {"dataset.max_samples": 5}),
    (MEGATRON + "  split: [99, 1, 0]\n", {"dataset.split": "99, 1, 0"}),
    (MEGATRON + "  splits_to_build: test\n  num_test_samples: 7\n", {"dataset.max_samples": 7}),
    (MEGATRON + "  splits_to_build: train\n", {"dataset.part": "train"}),
    (SQUAD + "  split: validation[:9]\n", {"dataset.split": "train[:9]"}),
    (
        (
            f"dataset:\n  _target_: {DATA}.llm.squad.make_squad_dataset\n  dataset_name: rows.jsonl\n"
            "  limit_dataset_samples: 5\n"
        ),
        {"dataset.path": "rows.jsonl"},
    ),
    (
        (
            f"dataset:\n  _target_: {DATA}.llm.column_mapped_text_instruction_dataset."
            "ColumnMappedTextInstructionDataset\n  path_or_dataset_id: rows.jsonl\n"
            "  column_mapping:\n    question: q\n    answer: a\n"
        ),
        {"dataset.completion_field": "a"},
    ),
    (
        COLUMNS + "  column_mapping:\n    context: c\n    question: q\n    answer: a\n",
        {"dataset.prompt_field": "{{ c }} {{ q }} "},
    ),
    (
        (
            f"dataloader:\n  collate_fn:\n    _target_: {DATA}.utils.default_collater\n"
            "    pad_seq_len_divisible: 16\n"
        ),
        {"dataloader.pad_to_multiple_of": 16},
    ),
    ("packed_sequence:\n  packed_sequence_size: 0\n", {"packed_sequence": None}),
    (
        "optimizer:\n  _target_: torch.optim.Adam\n  lr: 1e-5\n  weight_decay: 0\n",
        {"optimizer.lr": 1e-5},
    ),
    ("optimizer:\n  _target_: torch.optim.AdamW\n  lr: 1e-5\n", {"optimizer.no_decay": "none"}),
    ("lr_scheduler:\n  lr_decay_style: cosine\n", {"lr_scheduler.name": "cosine_with_min_lr"}),
    (
        "optimizer:\n  lr: 1e-3\nlr_scheduler:\n  lr_decay_style: cosine\n",
        {"lr_scheduler.kwargs.min_lr": 1e-5},
    ),
    ("lr_scheduler:\n  min_lr: 1e-6\n", {"lr_scheduler.kwargs.min_lr": 1e-6}),
    ("lr_scheduler:\n  lr_decay_style: constant\n", {"lr_scheduler.name": "constant_with_warmup"}),
    (
        "lr_scheduler:\n  lr_decay_style: constant\n  lr_warmup_steps: 0\n",
        {"lr_scheduler.name": "constant"},
    ),
    ("lr_scheduler:\n  lr_decay_style: linear\n", {"lr_scheduler.name": "polynomial"}),
    (
        "lr_scheduler:\n  lr_warmup_steps: 3\n",
        {"lr_scheduler.warmup_steps": 3, "lr_scheduler.warmup_from": 0.1},
    ),
    ("lr_scheduler:\n  lr_warmup_steps: 0\n", {"lr_scheduler.warmup_from": 0.0}),
    ("lr_scheduler:\n  min_lr: 0\n", {"lr_scheduler.warmup_steps": "auto"}),
    (
        "lr_scheduler:\n  lr_decay_style: constant\n  lr_decay_steps: 9\n",
        {"lr_scheduler.decay_steps": None},
    ),
    ("clip_grad_norm:\n  max_norm: 0.5\n", {"clip_grad_norm": 0.5}),
    ("step_scheduler:\n  val_every_steps: 3\n", {"step_scheduler.val_every_steps": None}),
    (
        VLM + "processor:\n  _target_: transformers.AutoProcessor.from_pretrained\n"
        "  pretrained_model_name_or_path: some/model\n",
        {"processor.from_pretrained": None},
    ),
    (
        VLM + "processor:\n  _target_: transformers.AutoProcessor.from_pretrained\n"
        "  pretrained_model_name_or_path: some/processor\n",
        {"processor.from_pretrained": "some/processor"},
    ),
    ("neftune:\n  noise_alpha: 4.0\n", {"model.neftune_alpha": 4.0}),
    ("neftune: {}\n", {"model.neftune_alpha": 5.0}),
    ("neftune: 0\n", {"model.neftune_alpha": None}),
    (VLM + "processor:\n  padding_side: right\n", {"processor.kwargs": {"padding_side": "right"}}),
    (
        MODEL + "  text_config:\n    rope_theta: 10000.0\n    use_cache: false\n",
        {"model.config_overrides": {"text_config": {"rope_theta": 10000.0}}},
    ),
    (
        VLM + "freeze_config:\n  freeze_embeddings: true\n  freeze_audio_tower: false\n",
        {
            "model.freeze_if_present": [
                "*vision*.*",
                "*visual*.*",
                "*image_encoder*.*",
                "*.embed_tokens.*",
            ]
        },
    ),
    (VLM + "freeze_config:\n  freeze_vision_tower: false\n", {"model.freeze_if_present": []}),
    (
        SQUAD,
        {
            "dataset.prompt": "Context: {{ context }} Question: {{ question }} Answer: ",
            "dataset.as_chat": "auto",
        },
    ),
    (
        COLUMNS + "  answer_only_loss_mask: false\n"
        "  column_mapping:\n    question: q\n    answer: a\n",
        {"dataset.learn": "all"},
    ),
    (CHAT + "  mask_reasoning_content: true\n", {"dataset.mask_reasoning": True}),
    (AGENT + "  truncate_history: true\n", {"dataset.truncation": "history"}),
    (AGENT + "  trim_incomplete_last_turn: true\n", {"dataset.end_with_answer": True}),
    (
        f"dataset:\n  _target_: {DATA}.llm.xlam.make_xlam_dataset\n",
        {"dataset._target_": "automodel_ckpt.data.function_calls.xlam"},
    ),
    (
        f"dataset:\n  _target_: {DATA}.llm.mock_iterable_dataset.MockIterableDataset\n  seq_len: 9\n",
        {"dataset.seq_length": 9},
    ),
    (f"dataset:\n  _target_: {DATA}.llm.mock.build_unpacked_dataset\n", {"dataset.end_token": 1}),
    (
        ROWS + "  tokenizer:\n    pretrained_model_name_or_path: some/tokenizer\n",
        {"tokenizer.from_pretrained": "some/tokenizer"},
    ),
    (VLM + MEDPIX, {"dataset.preset": "medpix"}),
    (VLM + MEDPIX.replace("medpix", "cord_v2"), {"dataset.preset": "cord_v2"}),
    (VLM + MEDPIX.replace("medpix", "rdr"), {"dataset.preset": "rdr"}),
    (VLM + MEDPIX.replace("medpix", "shopify_product_catalogue"), {"dataset.preset": "shopify"}),
    (VLM + MEDPIX.replace("medpix", "llava_onevision"), {"dataset.image_marker": "<image>"}),
    (
        VLM + f"dataset:\n  _target_: {DATA}.vlm.mock.build_mock_vlm_dataset\n  max_length: 30\n",
        {"dataset.num_words": 30},
    ),
    (
        VLM + MEDPIX + "dataloader:\n  collate_fn:\n"
        f"    _target_: {DATA}.vlm.collate_fns.gemma4_prefix_collate_fn\n",
        {"dataset.answer_prefix": "<|channel>thought\n<channel|>"},
    ),
    (
        VALIDATION.replace("validation_dataset", "validation_dataset_easy"),
        {"validation_datasets.easy._target_": "automodel_ckpt.data.hellaswag.hellaswag"},
    ),
    (
        "optimizer:\n  _target_: dion.Muon\n  lr: 1e-2\n  mu: 0.9\n  scalar_lr: 1e-4\n",
        {"optimizer.lr": 1e-4},
    ),
    (PEFT + QWEN, {"peft.base_dir": "automodel_base"}),
    ("compile:\n  enabled: false\n  dynamic: true\n", {"compile.dynamic": None}),
    ("wandb:\n  enable: false\n  project: p\n", {"logging.trackers": {}}),
    ("wandb:\n  project: p\n", {"logging.trackers": {"wandb": {"project": "p"}}}),
    ("mlflow:\n  experiment_name: e\n", {"logging.trackers": {"mlflow": {"experiment": "e"}}}),
    # It stays, and is not on the allowlist: a teacher has trained weights.
    (
        KD + TEACHER.replace("LM.from_pretrained", "LM.from_config"),
        {"distill.teacher._target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config"},
    ),
]


def test_a_flag_counts_where_the_files_value_has_no_effect(tmp_path: Path) -> None:
    text = MODEL + "  attn_implementation: sdpa\n"
    assert load(tmp_path, text).config.model.attn_implementation is None
    flagged = load(tmp_path, text, "--model.attn_implementation", "sdpa")
    assert flagged.config.model.attn_implementation == "sdpa"


@pytest.mark.parametrize(("text", "expected"), TRANSLATED)
def test_a_section_of_automodel_is_translated(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    loaded = load(tmp_path, text)
    assert {key: value_at(loaded, key) for key in expected} == expected


WITHOUT_EFFECT = [
    ("ci:\n  owner: me\n", "ci"),
    ("benchmark:\n  warmup_steps: 5\n", "benchmark"),
    ("_unused:\n  a: 1\n", "_unused"),
    ("distributed:\n  ep_size: 1\n", "distributed.ep_size"),
    ("validation_dataloader:\n  batch_size: 8\n", "validation_dataloader"),
    ("packed_sequence:\n  packed_sequence_size: 0\n", "packed_sequence.packed_sequence_size"),
    (
        "loss_fn:\n  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy\n",
        "loss_fn._target_",
    ),
    ("step_scheduler:\n  validate_on_checkpoint: true\n", "step_scheduler.validate_on_checkpoint"),
    (PEFT + "  expert_weight_format: unquantized\n", "peft.expert_weight_format"),
    ("step_scheduler:\n  val_every_steps: 10\n", "step_scheduler.val_every_steps"),
    ("fp8:\n  enabled: false\n", "fp8"),
    (SQUAD + "  split: validation\n", "dataset.split"),
    (MEGATRON + "  num_train_samples: 9\n", "dataset.num_train_samples"),
    (NANOGPT + "  bos_token: 5\n  align_to_bos: false\n", "dataset.bos_token"),
    ("dataloader:\n  collate_fn: torch.utils.data.default_collate\n", "dataloader.collate_fn"),
    (MODEL + "  attn_implementation: sdpa\n", "model.attn_implementation"),
    (
        SQUAD + "  split: train[:9]\n  limit_dataset_samples: 5\n",
        "dataset.limit_dataset_samples",
    ),
    (
        VLM + PEFT + "freeze_config:\n  freeze_embeddings: true\n",
        "freeze_config.freeze_embeddings",
    ),
]


@pytest.mark.parametrize(("text", "key"), WITHOUT_EFFECT)
def test_a_key_without_meaning_here_is_named_in_one_line(
    tmp_path: Path, text: str, key: str
) -> None:
    lines = [line for line in reported(load(tmp_path, text)) if "no meaning" in line]
    assert len(lines) == 1
    assert key in lines[0].partition(": ")[2].partition(": ")[2].split(", ")


def test_misspelled_keys_are_reported_at_once_with_names_of_automodel(tmp_path: Path) -> None:
    text = PEFT + (
        "  dims: 3\nrng:\n  sead: 1\ndistributed:\n  strategy: ddp\n  statik_graph: true\n"
        "checkpoint:\n  max_recent_checkpoint: 3\n"
    )
    text += MODEL.replace("name_or_path", "name_or_pth")
    with pytest.raises(RecipeError) as raised:
        load(tmp_path, text)
    found = {problem.what: problem for problem in raised.value.problems}
    for key, meant in (
        ("peft.dims", "peft.dim"),
        ("rng.sead", "rng.seed"),
        ("distributed.statik_graph", "distributed.static_graph"),
        ("checkpoint.max_recent_checkpoint", "checkpoint.max_recent_checkpoints"),
        ("model.pretrained_model_name_or_pth", "model.pretrained_model_name_or_path"),
    ):
        assert found[f"unknown key {key}"].hint == f"did you mean {meant}?"
    assert all(problem.where.startswith(str(tmp_path)) for problem in raised.value.problems)


def test_multi_token_prediction_is_translated_unless_no_token_is_wanted(tmp_path: Path) -> None:
    def mtp_of(*lines: str, text: str = MODEL) -> Any:
        keys = "".join(f"  {line}\n" for line in lines)
        return load(tmp_path, text + keys).config.model.mtp

    repeated = mtp_of(
        "num_nextn_predict_layers: 2",
        "mtp_use_repeated_layer: true",
        "mtp_loss_scaling_factor: 0.2",
    )
    assert (repeated.num_depths, repeated.repeat_layer) == (2, True)
    assert repeated.loss_scaling_factor == 0.2
    only_factor = mtp_of("mtp_loss_scaling_factor: 0.1")
    assert (only_factor.num_depths, only_factor.loss_scaling_factor) == (None, 0.1)
    nested = mtp_of("text_config:", "  mtp_num_hidden_layers: 1", "  mtp_expert_hf_layout: split")
    assert nested.num_depths == 1
    assert mtp_of("num_nextn_predict_layers: 0", "mtp_loss_scaling_factor: 0.1") is None
    assert mtp_of("mtp_use_repeated_layer: true") is None
    assert mtp_of() is None


DEGRADED = [
    (
        f"optimizer:\n  _target_: {TE_ADAM}\n  weight_decay: 0.1\n  adam_w_mode: false\n",
        ":2: optimizer._target_",
        "Adam of torch",
    ),
    (PEFT + "  expert_weight_format: mxfp4\n", "peft.expert_weight_format mxfp4", "data type"),
    ("distributed:\n  tp_size: 2\n  ep_size: 8\n", ":3: distributed.ep_size 8", "fsdp2 instead"),
    (
        VLM + MEDPIX + PIPELINE + "    layers_per_stage: 4\n",
        "distributed.pp_size 2",
        "fsdp2 shards the model instead",
    ),
    ("distributed:\n  strategy: ddp\n  ep_size: 8\n", ":3: distributed.ep_size 8", "replicates"),
    (
        "distributed:\n  pp_size: 2\n  pipeline:\n    pp_schedule: ZBVZeroBubble\n",
        ":4: distributed.pipeline.pp_schedule ZBVZeroBubble",
        "1f1b is used",
    ),
    (MODEL + "  attn_implementation: te\n", ":4: model.attn_implementation te", "default is used"),
    (
        "fp8:\n  enabled: true\n  enable_fsdp_float8_all_gather: true\n",
        ":3: fp8.enable_fsdp_float8_all_gather",
        "dtype of products",
    ),
    (
        PEFT + "  target_modules: ['*']\n  dropout: 0.1\n",
        ":3: peft.target_modules ",
        "because of dropout",
    ),
    (PEFT + "  target_modules: ['*']\n", ":3: peft.target_modules:", "the output layer"),
    (PEFT + "  match_all_linear: true\n", ":3: peft.match_all_linear:", "the output layer"),
    (PEFT + "  exclude_modules: ['*.o_proj']\n", ":3: peft.exclude_modules:", "the output layer"),
    (
        PEFT + "  target_modules: ['*']\ndistributed:\n  ep_size: 2\n",
        ":5: distributed.ep_size 2",
        "fsdp2 instead",
    ),
    (
        MODEL + "  num_nextn_predict_layers: 1\ndistributed:\n  pp_size: 2\n",
        ":4: model.num_nextn_predict_layers 1",
        "without multi-token prediction, because of distributed.pp_size",
    ),
    (
        "dataloader:\n  batch_size: 4\nstep_scheduler:\n  local_batch_size: 2\n",
        ":2: dataloader.batch_size 4",
        "step_scheduler.local_batch_size is used",
    ),
    (
        PEFT + "checkpoint:\n  model_save_format: torch_save\n",
        ":4: checkpoint.model_save_format torch_save",
        "safetensors",
    ),
    (MODEL + "  backend:\n    te_fp8:\n      recipe: mxfp8\n", ":5: model.backend.te_fp8", "fp8"),
    (
        MODEL + "  backend:\n    fake_balanced_gate: true\n",
        ":5: model.backend.fake_balanced_gate true",
        "the router chooses experts",
    ),
    (
        f"{VLM_DISTILLED}distributed:\n  pp_size: 2\n",
        "distributed.pp_size",
        "fsdp2 shards the model",
    ),
    (
        "optimizer:\n  _target_: transformer_engine.pytorch.optimizers.FusedAdam\n  lr: 1e-5\n",
        ":2: optimizer._target_",
        "AdamW of torch",
    ),
]


@pytest.mark.parametrize(("text", "where", "instead"), DEGRADED)
def test_a_degraded_key_gives_one_warning_with_its_line(
    tmp_path: Path, text: str, where: str, instead: str
) -> None:
    lines = reported(load(tmp_path, text))
    warnings = [line for line in lines if line.startswith("warning: ") and where in line]
    assert len(warnings) == 1
    assert instead in warnings[0]


REJECTED = [
    (
        "recipe: TrainEagle3Recipe\nrecipe_args:\n  target_model_name_or_path: m\n",
        1,
        "this recipe of NeMo AutoModel is not translated",
    ),
    (
        "recipe: BenchmarkingRecipeForNextTokenPrediction\n",
        1,
        "this recipe of NeMo AutoModel is not translated",
    ),
    (
        "recipe: TrainBiEncoderRecipe\n",
        1,
        "this recipe of NeMo AutoModel is not translated",
    ),
    (TEACHER, 1, "a teacher in this recipe is not supported"),
    (
        f"{KD}{TEACHER}kd_loss_fn:\n  _target_: torch.nn.KLDivLoss\n",
        6,
        "this divergence is not supported",
    ),
    (
        "recipe:\n  _target_: nemo_automodel.recipes.llm.benchmark.SomeRecipe\n",
        1,
        "is not translated",
    ),
    (
        "model:\n  _target_: nemo_automodel.NeMoAutoModelForMaskedLM.from_pretrained\n",
        2,
        "this model class is not supported",
    ),
    (
        f"optimizer:\n  _target_: {TE_ADAM}\n  bias_correction: no\n",
        3,
        "Adam without bias correction is not supported",
    ),
    ("quantization:\n  load_in_4bit: true\n", 2, "training of quantized weights is not supported"),
    (
        f"dataset:\n  _target_: {DATA}.llm.seq2seq.make_seq2seq_dataset\n  source_template: '{{a.b}}'\n",
        3,
        "a template of Python is not supported",
    ),
    (
        f"dataset:\n  _target_: {DATA}.audio.datasets.make_music_dataset\n  split: train\n",
        2,
        "this data set is not supported",
    ),
    (
        "loss_fn:\n  _target_: nemo_automodel.components.models.nemotron_parse.SomeLoss\n",
        2,
        "this loss is not supported",
    ),
    (
        VLM + MEDPIX.replace("medpix", "tulu3_magicoder_text_mix"),
        3,
        "this data set is not supported",
    ),
    (
        f"{VLM}{CHAT}  mask_reasoning_content: true\n",
        5,
        "reasoning without labels in this recipe is not supported",
    ),
    ("lr_scheduler:\n  lr_decay_style: WSD\n", 2, "this schedule is not supported"),
    ("distributed:\n  strategy: other\n", 2, "this strategy is not supported"),
    ("distributed:\n  unheard_of: 1\n", 2, "unknown key distributed.unheard_of"),
    ("unheard_of: 1\n", 1, "unknown key unheard_of"),
    (PIPELINE + "    unheard_of: 1\n", 5, "unknown key distributed.pipeline.unheard_of"),
    (QAT + "    unheard_of: 1\n", 8, "unknown key qat.qat_config.unheard_of"),
    ("neftune: [1]\n", 1, "unknown key neftune"),
    ("distributed:\n  ep_size: all\n", 2, "distributed.ep_size must be a whole number"),
    (
        "distributed:\n  activation_checkpointing: maybe\n",
        2,
        "model.activation_checkpointing must be",
    ),
    ("qat:\n  enabled: maybe\n", 2, "qat.enabled: must be true or false"),
    ("checkpoint:\n  checkpoint_dir: msc://profile/run\n", 2, "not the URL of a store"),
    (VLM + "freeze_config:\n  unfreeze_modules: [{glob: '*'}]\n", 3, "freezing by selectors"),
    ("compile:\n  enabled: maybe\n", 2, "compile.enabled: must be true or false"),
    (QAT + PEFT, 2, "qat and peft cannot be combined"),
    (PEFT + "  dim: 4\n  r: 8\n", 4, "peft.r is given twice"),
]


@pytest.mark.parametrize(("text", "line", "what"), REJECTED)
def test_a_key_of_a_missing_feature_is_an_error_with_its_line_and_a_hint(
    tmp_path: Path, text: str, line: int, what: str
) -> None:
    with pytest.raises(RecipeError) as error:
        load(tmp_path, text)
    (problem,) = [each for each in error.value.problems if what in each.what]
    assert problem.where == f"{tmp_path / 'theirs.yaml'}:{line}"
    assert problem.hint
    assert "nemo_automodel" not in problem.hint


def test_the_errors_name_the_feature_and_not_what_follows_from_its_absence(tmp_path: Path) -> None:
    text = f"dataset:\n  _target_: {DATA}.llm.mock_prefix_tree.make_trees\n  max_target_len: 3\n"
    with pytest.raises(RecipeError) as error:
        load(tmp_path, text + "comet:\n  project_name: p\n")
    assert len(error.value.problems) == 2


OVERRIDES: list[tuple[str, list[str], str, Any]] = [
    ("", ["--model.pretrained_model_name_or_path", "other"], "model.from_pretrained", "other"),
    ("", ["--model.from_pretrained", "other"], "model.from_pretrained", "other"),
    ("", ["--checkpoint.save_consolidated", "final"], "checkpoint.save_consolidated", "final"),
    ("", ["--step_scheduler.max_steps", "5"], "step_scheduler.max_steps", 5),
    ("", ["--step_scheduler.num_epochs", "null"], "step_scheduler.num_epochs", None),
    (MEGATRON + "step_scheduler:\n  max_steps: 3\n", ["--step_scheduler.num_epochs", "2"],
     "step_scheduler.num_epochs", 2),
    (PEFT, ["--peft.dim", "2"], "peft.r", 2),
    (PEFT + "  dim: 4\n", ["--peft.r", "2"], "peft.r", 2),
    (PEFT, ["--peft", "null"], "peft", None),
    ("clip_grad_norm:\n  max_norm: 2\n", ["--clip_grad_norm", "0.5"], "clip_grad_norm", 0.5),
    ("clip_grad_norm:\n  max_norm: 2\n", ["--clip_grad_norm", "null"], "clip_grad_norm", None),
    ("", ["--clip_grad_norm.max_norm", "0.5"], "clip_grad_norm", 0.5),
    ("", ["--dataset.path", "other.jsonl"], "dataset.path", "other.jsonl"),
    ("", ["--dataset.path_or_dataset", "other.jsonl"], "dataset.path", "other.jsonl"),
    ("", ["--dataset.seq_length", "32"], "dataset.seq_length", 32),
    ("", ["--packed_sequence.size", "64"], "packed_sequence.size", 64),
    ("packed_sequence:\n  packed_sequence_size: 8\n", ["--packed_sequence.size", "64"],
     "packed_sequence.size", 64),
    ("", ["--checkpoint.keep_last", "2"], "checkpoint.keep_last", 2),
    (
        VALIDATION + "step_scheduler:\n  val_every_steps: 3\n",
        ["--validation_dataset", "null"],
        "validation_dataset",
        None,
    ),
    ("", ["--distributed.mixed_precision", "null"], "distributed.mixed_precision", None),
    ("wandb:\n  enable: false\n  project: p\n", ["--wandb.enable", "true"], "logging.trackers",
     {"wandb": {"project": "p"}}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "key", "expected"), OVERRIDES)
def test_overrides_may_use_the_names_of_both_programs(
    tmp_path: Path, text: str, words: list[str], key: str, expected: Any
) -> None:
    assert value_at(load(tmp_path, text, *words), key) == expected


@pytest.mark.parametrize(
    "key",
    ["neftune", "wandb", "mlflow", "rng", "dist_env", "freeze_config", "quantization", "fp8", "ci", "slurm",
     "distributed.pipeline", "distributed.pipeline.layers_per_stage", "qat.qat_config", "checkpoint", "distributed",
     "checkpoint.max_recent_checkpoints", "optimizer.weight_decay"],
)  # fmt: skip
def test_null_disables_a_key_of_automodel_in_a_file_and_in_an_override(
    tmp_path: Path, key: str
) -> None:
    text = ""
    for depth, part in enumerate(key.split(".")):
        text += f"{'  ' * depth}{part}:\n"
    given = load(tmp_path, text[:-1] + " null\n")
    nothing = load(tmp_path, "")
    overridden = load(tmp_path, "", f"--{key}", "null")
    expected = dataclasses.asdict(nothing.config)
    assert dataclasses.asdict(given.config) == expected
    assert dataclasses.asdict(overridden.config) == expected


@pytest.mark.parametrize("target", [f"{TE_ADAM}\n  master_weights: true", "flashoptim.FlashAdamW"])
def test_an_optimizer_with_master_weights_gets_weights_in_float32(
    tmp_path: Path, target: str
) -> None:
    text = MODEL + f"  torch_dtype: bf16\noptimizer:\n  _target_: {target}\n"
    loaded = load(tmp_path, text)
    # Float32 for what is trained; frozen weights keep the 16 bits of their files.
    assert loaded.config.model.dtype is None
    assert loaded.config.distributed.mixed_precision == "bfloat16"
    assert "trained weights are kept in float32 (model.dtype: null)" in "\n".join(reported(loaded))
    with_ddp = load(tmp_path, f"{text}distributed:\n  strategy: ddp\n")
    assert with_ddp.config.distributed.mixed_precision == "bfloat16"
    # The base of adapters is frozen, and adapters are in float32 anyway.
    assert load(tmp_path, text + PEFT).config.model.dtype == "bfloat16"
    for flag in ("--model.torch_dtype=bf16", "--model.dtype=bfloat16"):
        assert load(tmp_path, text, flag).config.model.dtype == "bfloat16"


@pytest.mark.parametrize(
    "target",
    [TE_ADAM, f"{TE_ADAM}\n  master_weights: false", "flashoptim.FlashAdamW\n  master_weight_bits: null",
     "torch.optim.AdamW"],
)  # fmt: skip
def test_without_master_weights_the_optimizer_updates_bfloat16(tmp_path: Path, target: str) -> None:
    text = MODEL + f"  torch_dtype: bf16\noptimizer:\n  _target_: {target}\n"
    assert load(tmp_path, text).config.model.dtype == "bfloat16"


ADAM = "optimizer:\n  _target_: torch.optim.AdamW\n"


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (ADAM, "auto"),
        (QWEN, "bfloat16"),
        (QWEN + "  torch_dtype: auto\n", "bfloat16"),
        (QWEN + "  torch_dtype: float32\n", "float32"),
        (DISTILLED + ADAM, None),
        (DISTILLED + ADAM + MODEL + "  torch_dtype: auto\n", None),
        (DISTILLED + ADAM + MODEL + "  torch_dtype: bf16\n", "bfloat16"),
        (DISTILLED + ADAM + PEFT, "auto"),
    ],
)
def test_weights_without_a_data_type_have_that_of_automodel(
    tmp_path: Path, text: str, dtype: str | None
) -> None:
    assert load(tmp_path, text).config.model.dtype == dtype


@pytest.mark.parametrize(
    ("text", "theirs", "key", "expected"),
    [
        (PEFT + "  dim: 4\n", "peft.dim", "peft.r", 8),
        (MODEL + "  torch_dtype: bf16\n", "model.torch_dtype", "model.dtype", "auto"),
        ("clip_grad_norm:\n  max_norm: 2\n", "clip_grad_norm.max_norm", "clip_grad_norm", 1.0),
        (
            "lr_scheduler:\n  min_lr: 1e-6\noptimizer:\n  lr: 1e-3\n",
            "lr_scheduler.min_lr",
            "lr_scheduler.kwargs.min_lr",
            1e-5,
        ),
        ("distributed:\n  ep_size: 2\n", "distributed.ep_size", "distributed.ep_size", 1),
    ],
)
def test_a_null_override_is_the_default_of_a_key_of_automodel(
    tmp_path: Path, text: str, theirs: str, key: str, expected: Any
) -> None:
    assert value_at(load(tmp_path, text), key) != expected
    assert value_at(load(tmp_path, text, f"--{theirs}", "null"), key) == expected


def test_a_null_override_of_an_unknown_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"unknown key checkpoint\.foo"):
        load(tmp_path, "", "--checkpoint.foo", "null")


WHOLE = f"""\
step_scheduler:
  global_batch_size: 4
  max_steps: 3
rng:
  _target_: nemo_automodel.components.training.rng.StatefulRNG
  seed: 3
{MODEL}  torch_dtype: bf16
{PEFT}  target_modules: '*_proj'
  dim: 4
  use_triton: true
distributed:
  strategy: fsdp2
skypilot:
  instance: some
fp8:
  enabled: true
  recipe_name: rowwise
  filter_fqns: [lm_head]
{VALIDATION}optimizer:
  _target_: torch.optim.Adam
  betas: [0.9, 0.95]
  lr: 1e-5
  weight_decay: 0.01
lr_scheduler:
  lr_decay_style: cosine
ci:
  owner: me
"""


def test_the_converted_file_gives_the_same_configuration(tmp_path: Path) -> None:
    loaded = load(tmp_path, WHOLE)
    text = loaded.converted()
    ours = tmp_path / "ours.yaml"
    ours.write_text(text)
    again = load_recipe(ours)
    assert dataclasses.asdict(again.config) == dataclasses.asdict(loaded.config)
    assert again.notices == ()
    values = yaml.safe_load(text)
    # Our own defaults are not written.
    assert "logging" not in values


@pytest.mark.parametrize("odd", ["3", "[1, 2]", "{_target_: [1]}"])
@pytest.mark.parametrize(
    "key",
    ["model", "model.config", "model._target_", "peft", "freeze_config", "distributed",
     "distributed.tp_size", "distributed.pipeline", "distributed.mp_policy", "dataset", "dataset.column_mapping",
     "dataset.tokenizer", "dataloader", "dataloader.collate_fn", "packed_sequence", "optimizer",
     "lr_scheduler", "step_scheduler", "clip_grad_norm", "loss_fn", "processor", "rng", "wandb",
     "quantization", "neftune", "fp8"],
)  # fmt: skip
def test_a_value_of_another_type_is_an_error_of_the_recipe_or_accepted(
    tmp_path: Path, key: str, odd: str
) -> None:
    values = yaml.safe_load(WHOLE + LLM + ROWS)
    section = values
    *parents, last = key.split(".")
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = yaml.safe_load(odd)
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text(yaml.safe_dump(values))
    with suppress(RecipeError):
        load_recipe(recipe).converted()


def test_the_converted_file_has_a_comment_for_each_changed_and_dropped_key(tmp_path: Path) -> None:
    text = load(tmp_path, WHOLE).converted()
    assert "from_pretrained: some/model" in text
    assert "# was model.pretrained_model_name_or_path" in text
    assert "# was peft.dim" in text
    assert "# default of NeMo AutoModel" in text
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert any("skypilot: " in line for line in comments)
    assert any("peft.use_triton" in line and "ci" in line for line in comments)


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, node) of each value that is not null; a list counts as one value."""
    children = node.children()
    if isinstance(node.value, list) or not children:
        if not node.is_null:
            yield key, node
        return
    for name, child in children:
        yield from leaves(child, f"{key}.{name}" if key else name)


def origins(node: Any) -> Iterator[str]:
    yield node.origin
    for _, child in node.children():
        yield from origins(child)


def test_a_file_without_recipe_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text(MODEL + ROWS)
    with pytest.raises(
        RecipeError, match=r"the key recipe is missing, as in recipes .* before 0.4"
    ):
        load_recipe(recipe)


def test_only_recipes_of_automodel_are_converted(tmp_path: Path) -> None:
    text = LLM.replace("TrainFinetuneRecipeForNextTokenPrediction", "llm_finetune")
    text += "model:\n  from_pretrained: some/model\n"
    text += "dataset:\n  _target_: automodel_ckpt.data.text.text\n  path: rows.jsonl\n"
    loaded = load(tmp_path, text)
    assert loaded.translated is None
    with pytest.raises(RecipeError, match="not a recipe of NeMo AutoModel, axolotl"):
        loaded.converted()


def test_every_value_keeps_its_line_and_defaults_say_whose_they_are(tmp_path: Path) -> None:
    loaded = load(tmp_path, WHOLE)
    assert loaded.origins["peft.r"].endswith("theirs.yaml:14")
    assert loaded.origins["peft.alpha"] == "default of NeMo AutoModel"
    assert loaded.origins["logging.level"] == "default"


def test_references_to_the_environment_are_those_of_automodel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASE_DIR", "somewhere")
    text = "checkpoint:\n  checkpoint_dir: ${BASE_DIR}/run\n" + MODEL.replace(
        "some/model", "${NO_SUCH_MODEL,some/default}"
    )
    loaded = load(tmp_path, text)
    assert value_at(loaded, "checkpoint.checkpoint_dir") == "somewhere/run"
    assert value_at(loaded, "model.from_pretrained") == "some/default"


def test_the_users_own_builders_stay_as_they_are(tmp_path: Path) -> None:
    text = "dataset:\n  _target_: my_package.rows\n  depth: 3\n"
    loaded = load(tmp_path, text)
    assert value_at(loaded, "dataset._target_") == "my_package.rows"
    assert value_at(loaded, "dataset.depth") == 3


CLASSIFIER = """\
model:
  _target_: nemo_automodel.NeMoAutoModelForSequenceClassification.from_pretrained
  pretrained_model_name_or_path: some/encoder
  num_labels: 2
checkpoint:
  skip_task_head_prefixes_for_base_model: ["classifier."]
dataset:
  _target_: nemo_automodel.components.datasets.llm.seq_cls.GLUE_MRPC
  split: train
  num_samples_limit: 512
dataloader:
  collate_fn: nemo_automodel.components.datasets.utils.seq_cls_collater
validation_dataset:
  _target_: nemo_automodel.components.datasets.llm.seq_cls.IMDB
  split: test
  max_length: 128
"""


def test_a_recipe_for_texts_with_labels_is_translated(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("recipe: TrainFinetuneRecipeForSequenceClassification\n" + CLASSIFIER)
    config = load_recipe(path).config
    assert config.recipe == "sequence_classification"
    assert config.classification.num_labels == 2
    assert config.model.from_pretrained == "some/encoder"
    builder = "automodel_ckpt.data.classification.texts"
    assert config.dataset._target_ == config.validation_dataset._target_ == builder
    assert config.dataset.kwargs == {
        "path": "nyu-mll/glue",
        "name": "mrpc",
        "text_field": "sentence1",
        "pair_field": "sentence2",
        "truncation": "right",
        "split": "train",
        "max_samples": 512,
        "seq_length": 256,
    }
    assert config.validation_dataset.kwargs == {
        "path": "stanfordnlp/imdb",
        "truncation": "right",
        "split": "test",
        "seq_length": 128,
    }


def test_overrides_of_our_length_and_truncation_count_in_a_file_of_automodel(
    tmp_path: Path,
) -> None:
    config = load(tmp_path, SQUAD, "--dataset.seq_length", "64", "--dataset.truncation", "skip")
    assert config.config.dataset.kwargs["seq_length"] == 64
    assert config.config.dataset.kwargs["truncation"] == "skip"


def test_a_length_that_automodel_ignores_is_named(tmp_path: Path) -> None:
    lines = reported(load(tmp_path, SQUAD + "  seq_length: 64\n"))
    assert any("dataset.seq_length: without truncation: true" in line for line in lines)


def test_a_frozen_vision_tower_includes_its_projector_and_a_language_model_no_output_layer(
    tmp_path: Path,
) -> None:
    """The names are those of Qwen2.5-VL, Gemma 4 and Llava; AutoModel looks for words in them."""
    names = {
        "model.visual.blocks.0.attn.qkv.weight",
        "model.visual.merger.mlp.0.weight",
        "model.embed_vision.embedding_projection.weight",
        "model.vision_tower.layers.0.q_proj.weight",
        "model.multi_modal_projector.linear_1.weight",
        "model.language_model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
    }

    def frozen(part: str) -> set[str]:
        text = VLM + f"freeze_config:\n  {part}: true\n"
        if part != "freeze_vision_tower":
            text += "  freeze_vision_tower: false\n"
        patterns = load(tmp_path, text).config.model.freeze_if_present
        return {name for name in names for pattern in patterns if fnmatchcase(name, pattern)}

    assert frozen("freeze_language_model") == {"model.language_model.layers.0.mlp.up_proj.weight"}
    vision = {name for name in names if "visual" in name or "vision" in name}
    assert frozen("freeze_audio_tower") == set()
    assert frozen("freeze_vision_tower") == vision


SPEECH = f"{VLM}model:\n  pretrained_model_name_or_path: org/omni\n"


def test_transcripts_of_a_data_set_are_translated(tmp_path: Path) -> None:
    dataset = (
        f"dataset:\n  _target_: {DATA}.audio.datasets.make_hf_audio_asr_dataset\n"
        "  path_or_dataset: edinburghcstr/ami\n  name: ihm\n  text_column: words\n"
        "  sampling_rate: 16000\n  system_prompt: null\n  user_prompt: Transcribe.\n"
        "  drop_empty_text: false\n  min_audio_duration_seconds: 1.0\n"
    )
    collator = f"{DATA}.audio.collate_fns.qwen2_5_omni_asr_collate_fn"
    loader = f"dataloader:\n  collate_fn:\n    _target_: {collator}\n"
    frozen = "freeze_config:\n  freeze_audio_tower: false\n"
    loaded = load(tmp_path, SPEECH + dataset + loader + frozen)
    section = loaded.config.dataset
    assert section is not None
    assert section._target_ == "automodel_ckpt.data.vlm.transcripts"
    assert section.kwargs == {
        "path": "edinburghcstr/ami",
        "name": "ihm",
        "text_field": "words",
        "prompt": "Transcribe.",
        "skip_empty": False,
        "min_seconds": 1.0,
        "seq_length": None,
        "truncation": "right",
    }
    assert value_at(loaded, "model.freeze_if_present")[-1] == "*.audio_bos_eos_token.*"


def test_common_voice_is_translated(tmp_path: Path) -> None:
    dataset = (
        f"dataset:\n  _target_: {DATA}.audio.datasets.make_cv17_dataset\n  split: validation\n"
    )
    section = load(tmp_path, SPEECH + dataset).config.dataset
    assert section is not None
    assert section.kwargs == {
        "path": "ysdede/commonvoice_17_tr_fixed",
        "split": "validation",
        "text_field": "transcription",
        "prompt": "Transcribe the Turkish audio clip.",
        "prompt_first": False,
        "seq_length": None,
        "truncation": "right",
    }


@pytest.mark.parametrize(
    "auto_class",
    ["nemo_automodel.NeMoAutoModelForSeq2SeqLM", "transformers.AutoModelForSeq2SeqLM"],
)
def test_sources_and_targets(tmp_path: Path, auto_class: str) -> None:
    text = f"model:\n  _target_: {auto_class}.from_pretrained\n"
    text += "  pretrained_model_name_or_path: google-t5/t5-small\n"
    text += f"dataset:\n  _target_: {DATA}.llm.seq2seq.make_seq2seq_dataset\n"
    recipe = load(tmp_path, text).config
    assert recipe.recipe == "seq2seq"
    assert recipe.dataset._target_ == "automodel_ckpt.data.seq2seq.source_target"
    arguments = recipe.dataset.kwargs
    assert arguments["path"] == "rajpurkar/squad"
    assert (arguments["seq_length"], arguments["truncation"]) == (None, "right")
    row = {"question": " Who? ", "context": "She.", "answers": {"text": [" she ", "her"]}}
    source = Template(arguments["source_field"])
    target = Template(arguments["target_field"])
    assert source.render(row) == "question:  Who?   context: She."
    assert target.render(row) == "she"
    assert target.render(answers={"text": []}) == ""
    assert target.render(answers=" plain ") == "plain"
    text += "  seq_length: 8\n  source_field: body\n  target_key: title\n"
    text += "  decoder_start_token_id: 2\n"
    recipe = load(tmp_path, text).config
    assert recipe.dataset.kwargs["source_field"] == "body"
    assert recipe.dataset.kwargs["seq_length"] == 8
    assert recipe.model.config_overrides == {"decoder_start_token_id": 2}
    assert Template(recipe.dataset.kwargs["target_field"]).render(title="a ") == "a"
