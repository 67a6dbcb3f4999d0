"""Recipes of NeMo AutoModel: each row of the mapping, overrides in both spellings, and the converted file.

The recipes are written here, in AutoModel's format.
"""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Template

from automodel_ckpt import load_recipe
from automodel_ckpt.config.load import convert_recipe
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
ITERABLE = (
    "column_mapped_text_instruction_iterable_dataset.ColumnMappedTextInstructionIterableDataset"
)
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


def written(items: str) -> str:
    """The file with *items*: names of the blocks above, and dotted keys with their values in YAML."""
    text, path = "", list[str]()
    for item in items.split("; "):
        if item.isupper():
            block = globals()[item]
            text += block
            for line in block.splitlines():
                depth = (len(line) - len(line.lstrip())) // 2
                path = [*path[:depth], line.strip().partition(":")[0]]
            continue
        key, _, value = item.partition(":")
        *parents, last = key.split(".")
        for depth, parent in enumerate(parents):
            if path[: depth + 1] != parents[: depth + 1]:
                text += f"{'  ' * depth}{parent}:\n"
                path = parents[: depth + 1]
        path = [*parents, last]
        text += f"{'  ' * len(parents)}{last}:{value}\n"
    return re.sub(r"\b(DATA|ITERABLE|TE_ADAM)\b", lambda name: str(globals()[name[0]]), text)


def rows_of(table: str) -> list[list[str]]:
    """The columns of each line. An indented line continues the one before."""
    lines = table.strip().replace("\n ", "").splitlines()
    return [line.split(" | ") for line in lines]


def values_of(items: str) -> dict[str, Any]:
    pairs = (item.partition(": ") for item in items.split("; "))
    return {key: yaml.safe_load(value) for key, _, value in pairs}


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


def converted(loaded: Any) -> str:
    return convert_recipe(loaded.path, loaded.overrides)


def reported(loaded: Any) -> list[str]:
    """The comments at the top of the converted file: what the translation dropped or changed."""
    return [line[2:] for line in converted(loaded).splitlines() if line.startswith("# ")]


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
TRANSLATED = """
distributed.strategy: megatron-fsdp | distributed.strategy: auto
distributed.enable_compile: true | compile.enabled: true
MODEL; model.router_aux_loss_coef: 0.5 |
  model.config_overrides: {router_aux_loss_coef: 0.5, output_router_logits: true}; model.router_aux_loss: micro_batch
MODEL; model.router_aux_loss_coef: 0.0 | model.config_overrides: {router_aux_loss_coef: 0.0}
dataset._target_: DATA.llm.ChatDataset; dataset.path_or_dataset_id: rows.jsonl |
  dataset._target_: automodel_ckpt.data.chat.messages
dataset._target_: DATA.llm.ITERABLE; dataset.path_or_dataset_id: rows.jsonl; dataset.column_mapping.question: q;
  dataset.column_mapping.answer: a | dataset.streaming: true; dataloader.shuffle: false
VLM; CHAT; dataset.tokenizer.pretrained_model_name_or_path: another |
  dataset._target_: automodel_ckpt.data.vlm.conversations; tokenizer.from_pretrained: null
VLM; CHAT; dataset.mask_history: true | dataset.learn: last
step_scheduler.log_remote_every_steps: 5; wandb.project: p | logging.log_every_steps: 5
MEGATRON; step_scheduler.max_steps: 3 | step_scheduler.num_epochs: null; step_scheduler.ckpt_every_epochs: null
MEGATRON | step_scheduler.ckpt_every_epochs: 1; dataset._target_: automodel_ckpt.data.token_files.megatron;
  dataset.path: data/web_*; dataset.split: 900, 50, 50; dataset.seq_length: 2048
LLM | recipe: llm_finetune
DISTILLED | recipe: distill; distill.teacher.from_pretrained: some/teacher; distill.teacher.dtype: auto;
  distill.divergence: forward_kl; distill.kd_ratio: 0.25; distill.temperature: 3.0; distill.offload_teacher: true
VLM_DISTILLED | recipe: vlm_distill; model.freeze_if_present: ['*vision*.*', '*visual*.*', '*image_encoder*.*']
VLM | recipe: vlm_finetune
QAT | qat.scheme: W4A16; qat.group_size: 256; qat.start_step: 1
qat.enabled: true | qat.scheme: W4A8
qat.enabled: false; qat.fake_quant_after_n_steps: 1 | qat: null
tool_call_eval: null | evaluation: null
rng.seed: 1111; rng.ranked: true | seed: 1111
rng.deterministic: true | deterministic: true
dist_env.backend: nccl | distributed.backend: null
dist_env.timeout_minutes: 5 | distributed.timeout_minutes: 5.0
LLM | model.from_pretrained: some/model; model.dtype: auto;
  dataset._target_: automodel_ckpt.data.hellaswag.hellaswag; dataset.seq_length: null; dataset.truncation: right;
  lr_scheduler: null; clip_grad_norm: 1.0; step_scheduler.global_batch_size: 32; step_scheduler.ckpt_every_steps: 100
MODEL; model.torch_dtype: torch.bfloat16 | model.dtype: bfloat16
model._target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config; model.config: some/model |
  model.from_config: some/model
QWEN | model.from_config: {model_type: qwen3_moe, hidden_size: 16}
distributed.activation_checkpointing: true | model.activation_checkpointing: true
distributed.strategy: ddp | distributed.mixed_precision: none
distributed.strategy: ddp; distributed.autocast_dtype: torch.bfloat16 | distributed.mixed_precision: bfloat16
distributed.mp_policy._target_: torch.distributed.fsdp.MixedPrecisionPolicy;
  distributed.mp_policy.param_dtype: float32 | distributed.mixed_precision: null
VLM; MEDPIX; PIPELINE; distributed.pipeline.pp_microbatch_size: 2 | distributed.pp_size: 1;
  step_scheduler.local_batch_size: 2
PIPELINE | distributed.pp_schedule: 1f1b
VLM; MEDPIX; packed_sequence.pack_size: 64; packed_sequence.max_length: 32 | packed_sequence.size: 64;
  dataset.seq_length: 32
VLM; MEDPIX; packed_sequence.pack_size: 64; packed_sequence.drop_long_samples: true | dataset.truncation: skip
PEFT; peft.dim: 4 | peft.r: 4
PEFT | peft.alpha: 32; peft.target_modules: ['*_proj']
PEFT; peft.target_modules: ['*'] | peft.target_modules: all-linear; peft.target_parameters: all-experts
PEFT; peft.exclude_modules: ['*lm_head*'] | peft.exclude_if_present: ['*lm_head*']; peft.exclude_modules: []
VLM; PEFT; peft.exclude_modules: ['*visual*', '*.head']; freeze_config.freeze_vision_tower: true;
  freeze_config.freeze_audio_tower: true |
  peft.exclude_if_present: ['*visual*', '*.head', '*vision*', '*image_encoder*', '*audio*', '*speech*', '*sound*']
VLM; PEFT; freeze_config.freeze_embeddings: true |
  peft.exclude_if_present: ['*vision*', '*visual*', '*image_encoder*']
PEFT; quantization.load_in_4bit: true; quantization.bnb_4bit_quant_type: nf4 | peft.quantize_base: nf4
PEFT; quantization.load_in_8bit: true | peft.quantize_base: int8
checkpoint.max_recent_checkpoints: 3 | checkpoint.keep_last: 3
step_scheduler.num_epochs: null | step_scheduler.num_epochs: 10
optimizer._target_: TE_ADAM; optimizer.lr: 1e-5 | optimizer.weight_decay: 0.0
optimizer._target_: TE_ADAM; optimizer.weight_decay: 0.1; optimizer.adam_w_mode: false |
  optimizer._target_: torch.optim.Adam
VALIDATION; checkpoint.best_metric_key: default | checkpoint.best_metric_key: val_loss
VLM; MEDPIX; dataset.max_length: 512 | dataset.seq_length: 512
ROWS; dataset.num_samples_limit: 5 | dataset.max_samples: 5
MEGATRON; dataset.split: [99, 1, 0] | dataset.split: 99, 1, 0
MEGATRON; dataset.splits_to_build: test; dataset.num_test_samples: 7 | dataset.max_samples: 7
SQUAD; dataset.split: validation[:9] | dataset.split: train[:9]
SQUAD; dataset.limit_dataset_samples: 5 | dataset.path: rows.jsonl
COLUMNS; dataset.column_mapping.question: q; dataset.column_mapping.answer: a | dataset.completion_field: a
COLUMNS; dataset.column_mapping.context: c; dataset.column_mapping.question: q; dataset.column_mapping.answer: a |
  dataset.prompt_field: '{{ c }} {{ q }} '
dataloader.collate_fn._target_: DATA.utils.default_collater; dataloader.collate_fn.pad_seq_len_divisible: 16 |
  dataloader.pad_to_multiple_of: 16
packed_sequence.packed_sequence_size: 0 | packed_sequence: null
optimizer._target_: torch.optim.Adam; optimizer.lr: 1e-5; optimizer.weight_decay: 0 | optimizer.lr: 1.0e-05
ADAM; optimizer.lr: 1e-5 | optimizer.no_decay: none
lr_scheduler.lr_decay_style: cosine | lr_scheduler.name: cosine_with_min_lr
optimizer.lr: 1e-3; lr_scheduler.lr_decay_style: cosine | lr_scheduler.kwargs.min_lr: 1.0e-05
lr_scheduler.min_lr: 1e-6 | lr_scheduler.kwargs.min_lr: 1.0e-06
lr_scheduler.lr_decay_style: constant; lr_scheduler.lr_warmup_steps: 0 | lr_scheduler.name: constant
lr_scheduler.lr_decay_style: linear | lr_scheduler.name: polynomial
lr_scheduler.lr_warmup_steps: 3 | lr_scheduler.warmup_steps: 3; lr_scheduler.warmup_from: 0.1
lr_scheduler.min_lr: 0 | lr_scheduler.warmup_steps: auto
lr_scheduler.lr_decay_style: constant; lr_scheduler.lr_decay_steps: 9 | lr_scheduler.decay_steps: null
clip_grad_norm.max_norm: 0.5 | clip_grad_norm: 0.5
step_scheduler.val_every_steps: 3 | step_scheduler.val_every_steps: null
VLM; processor._target_: transformers.AutoProcessor.from_pretrained;
  processor.pretrained_model_name_or_path: some/model | processor.from_pretrained: null
VLM; processor._target_: transformers.AutoProcessor.from_pretrained;
  processor.pretrained_model_name_or_path: some/processor | processor.from_pretrained: some/processor
neftune.noise_alpha: 4.0 | model.neftune_alpha: 4.0
neftune: {} | model.neftune_alpha: 5.0
VLM; processor.padding_side: right | processor.kwargs: {padding_side: right}
MODEL; model.text_config.rope_theta: 10000.0; model.text_config.use_cache: false |
  model.config_overrides: {text_config: {rope_theta: 10000.0}}
VLM; freeze_config.freeze_embeddings: true; freeze_config.freeze_audio_tower: false |
  model.freeze_if_present: ['*vision*.*', '*visual*.*', '*image_encoder*.*', '*.embed_tokens.*']
SQUAD | dataset.prompt: 'Context: {{ context }} Question: {{ question }} Answer: '; dataset.as_chat: auto
COLUMNS; dataset.answer_only_loss_mask: false; dataset.column_mapping.question: q;
  dataset.column_mapping.answer: a | dataset.learn: all
CHAT; dataset.mask_reasoning_content: true | dataset.mask_reasoning: true
AGENT; dataset.truncate_history: true | dataset.truncation: history
AGENT; dataset.trim_incomplete_last_turn: true | dataset.end_with_answer: true
dataset._target_: DATA.llm.xlam.make_xlam_dataset | dataset._target_: automodel_ckpt.data.function_calls.xlam
dataset._target_: DATA.llm.mock_iterable_dataset.MockIterableDataset; dataset.seq_len: 9 | dataset.seq_length: 9
dataset._target_: DATA.llm.mock.build_unpacked_dataset | dataset.end_token: 1
ROWS; dataset.tokenizer.pretrained_model_name_or_path: some/tokenizer | tokenizer.from_pretrained: some/tokenizer
VLM; MEDPIX | dataset.preset: medpix
VLM; dataset._target_: DATA.vlm.datasets.make_cord_v2_dataset; dataset.path_or_dataset: some/images |
  dataset.preset: cord_v2
VLM; dataset._target_: DATA.vlm.datasets.make_rdr_dataset; dataset.path_or_dataset: some/images | dataset.preset: rdr
VLM; dataset._target_: DATA.vlm.datasets.make_shopify_product_catalogue_dataset;
  dataset.path_or_dataset: some/images | dataset.preset: shopify
VLM; dataset._target_: DATA.vlm.datasets.make_llava_onevision_dataset; dataset.path_or_dataset: some/images |
  dataset.image_marker: <image>
VLM; dataset._target_: DATA.vlm.mock.build_mock_vlm_dataset; dataset.max_length: 30 | dataset.num_words: 30
VLM; MEDPIX; dataloader.collate_fn._target_: DATA.vlm.collate_fns.gemma4_prefix_collate_fn |
  dataset.answer_prefix: "<|channel>thought\\n<channel|>"
validation_dataset_easy._target_: DATA.llm.hellaswag.HellaSwag;
  validation_dataset_easy.path_or_dataset: rows.jsonl |
  validation_datasets.easy._target_: automodel_ckpt.data.hellaswag.hellaswag
optimizer._target_: dion.Muon; optimizer.lr: 1e-2; optimizer.mu: 0.9; optimizer.scalar_lr: 1e-4 | optimizer.lr: 0.0001
PEFT; QWEN | peft.base_dir: automodel_base
compile.enabled: false; compile.dynamic: true | compile.dynamic: null
wandb.enable: false; wandb.project: p | logging.trackers: {}
wandb.project: p | logging.trackers: {wandb: {project: p}}
mlflow.experiment_name: e | logging.trackers: {mlflow: {experiment: e}}
KD; teacher_model._target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config;
  teacher_model.pretrained_model_name_or_path: some/teacher |
  distill.teacher._target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
"""
"""The class of the last line stays, and is not on the allowlist: a teacher has trained weights."""


def test_a_flag_counts_where_the_files_value_has_no_effect(tmp_path: Path) -> None:
    text = MODEL + "  attn_implementation: sdpa\n"
    assert load(tmp_path, text).config.model.attn_implementation is None
    flagged = load(tmp_path, text, "--model.attn_implementation", "sdpa")
    assert flagged.config.model.attn_implementation == "sdpa"


@pytest.mark.parametrize(("items", "translation"), rows_of(TRANSLATED))
def test_a_section_of_automodel_is_translated(tmp_path: Path, items: str, translation: str) -> None:
    loaded, expected = load(tmp_path, written(items)), values_of(translation)
    found = {key: value_at(loaded, key) for key in expected}
    assert found == expected and all(type(found[key]) is type(expected[key]) for key in found)


WITHOUT_EFFECT = """
ci.owner: me | ci
distributed.ep_size: 1 | distributed.ep_size
validation_dataloader.batch_size: 8 | validation_dataloader
packed_sequence.packed_sequence_size: 0 | packed_sequence.packed_sequence_size
loss_fn._target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy | loss_fn._target_
step_scheduler.validate_on_checkpoint: true | step_scheduler.validate_on_checkpoint
PEFT; peft.expert_weight_format: unquantized | peft.expert_weight_format
step_scheduler.val_every_steps: 10 | step_scheduler.val_every_steps
fp8.enabled: false | fp8
SQUAD; dataset.split: validation | dataset.split
MEGATRON; dataset.num_train_samples: 9 | dataset.num_train_samples
NANOGPT; dataset.bos_token: 5; dataset.align_to_bos: false | dataset.bos_token
dataloader.collate_fn: torch.utils.data.default_collate | dataloader.collate_fn
MODEL; model.attn_implementation: sdpa | model.attn_implementation
SQUAD; dataset.split: train[:9]; dataset.limit_dataset_samples: 5 | dataset.limit_dataset_samples
VLM; PEFT; freeze_config.freeze_embeddings: true | freeze_config.freeze_embeddings
"""


@pytest.mark.parametrize(("items", "key"), rows_of(WITHOUT_EFFECT))
def test_a_key_without_meaning_here_is_named_in_one_line(
    tmp_path: Path, items: str, key: str
) -> None:
    lines = [line for line in reported(load(tmp_path, written(items))) if "no meaning" in line]
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


DEGRADED = """
optimizer._target_: TE_ADAM; optimizer.weight_decay: 0.1; optimizer.adam_w_mode: false | :2: optimizer._target_ |
  Adam of torch
PEFT; peft.expert_weight_format: mxfp4 | peft.expert_weight_format mxfp4 | data type
distributed.tp_size: 2; distributed.ep_size: 8 | :3: distributed.ep_size 8 | fsdp2 instead
VLM; MEDPIX; PIPELINE; distributed.pipeline.layers_per_stage: 4 | distributed.pp_size 2 |
  fsdp2 shards the model instead
distributed.strategy: ddp; distributed.ep_size: 8 | :3: distributed.ep_size 8 | replicates
distributed.pp_size: 2; distributed.pipeline.pp_schedule: ZBVZeroBubble |
  :4: distributed.pipeline.pp_schedule ZBVZeroBubble | 1f1b is used
MODEL; model.attn_implementation: te | :4: model.attn_implementation te | default is used
fp8.enabled: true; fp8.enable_fsdp_float8_all_gather: true | :3: fp8.enable_fsdp_float8_all_gather | dtype of products
PEFT; peft.target_modules: ['*']; peft.dropout: 0.1 | :3: peft.target_modules  | because of dropout
PEFT; peft.target_modules: ['*'] | :3: peft.target_modules: | the output layer
PEFT; peft.exclude_modules: ['*.o_proj'] | :3: peft.exclude_modules: | the output layer
PEFT; peft.target_modules: ['*']; distributed.ep_size: 2 | :5: distributed.ep_size 2 | fsdp2 instead
MODEL; model.num_nextn_predict_layers: 1; distributed.pp_size: 2 | :4: model.num_nextn_predict_layers 1 |
  without multi-token prediction, because of distributed.pp_size
dataloader.batch_size: 4; step_scheduler.local_batch_size: 2 | :2: dataloader.batch_size 4 |
  step_scheduler.local_batch_size is used
PEFT; checkpoint.model_save_format: torch_save | :4: checkpoint.model_save_format torch_save | safetensors
MODEL; model.backend.te_fp8.recipe: mxfp8 | :5: model.backend.te_fp8 | fp8
MODEL; model.backend.fake_balanced_gate: true | :5: model.backend.fake_balanced_gate true | the router chooses experts
VLM_DISTILLED; distributed.pp_size: 2 | distributed.pp_size | fsdp2 shards the model
optimizer._target_: TE_ADAM; optimizer.lr: 1e-5 | :2: optimizer._target_ | AdamW of torch
"""


@pytest.mark.parametrize(("items", "where", "instead"), rows_of(DEGRADED))
def test_a_degraded_key_gives_one_warning_with_its_line(
    tmp_path: Path, items: str, where: str, instead: str
) -> None:
    lines = reported(load(tmp_path, written(items)))
    warnings = [line for line in lines if line.startswith("warning: ") and where in line]
    assert len(warnings) == 1
    assert instead in warnings[0]


REJECTED = """
recipe: TrainEagle3Recipe; recipe_args.target_model_name_or_path: m | 1 |
  this recipe of NeMo AutoModel is not translated
recipe: BenchmarkingRecipeForNextTokenPrediction | 1 | this recipe of NeMo AutoModel is not translated
TEACHER | 1 | a teacher in this recipe is not supported
KD; TEACHER; kd_loss_fn._target_: torch.nn.KLDivLoss | 6 | this divergence is not supported
recipe._target_: nemo_automodel.recipes.llm.benchmark.SomeRecipe | 1 | is not translated
model._target_: nemo_automodel.NeMoAutoModelForMaskedLM.from_pretrained | 2 | this model class is not supported
optimizer._target_: TE_ADAM; optimizer.bias_correction: no | 3 | Adam without bias correction is not supported
quantization.load_in_4bit: true | 2 | training of quantized weights is not supported
dataset._target_: DATA.llm.seq2seq.make_seq2seq_dataset; dataset.source_template: '{a.b}' | 3 |
  a template of Python is not supported
dataset._target_: DATA.audio.datasets.make_music_dataset; dataset.split: train | 2 | this data set is not supported
loss_fn._target_: nemo_automodel.components.models.nemotron_parse.SomeLoss | 2 | this loss is not supported
VLM; dataset._target_: DATA.vlm.datasets.make_tulu3_magicoder_text_mix_dataset;
  dataset.path_or_dataset: some/images | 3 | this data set is not supported
VLM; CHAT; dataset.mask_reasoning_content: true | 5 | reasoning without labels in this recipe is not supported
lr_scheduler.lr_decay_style: WSD | 2 | this schedule is not supported
distributed.strategy: other | 2 | this strategy is not supported
distributed.unheard_of: 1 | 2 | unknown key distributed.unheard_of
unheard_of: 1 | 1 | unknown key unheard_of
PIPELINE; distributed.pipeline.unheard_of: 1 | 5 | unknown key distributed.pipeline.unheard_of
distributed.ep_size: all | 2 | distributed.ep_size must be a whole number
distributed.activation_checkpointing: maybe | 2 | model.activation_checkpointing must be
qat.enabled: maybe | 2 | qat.enabled: must be true or false
checkpoint.checkpoint_dir: msc://profile/run | 2 | not the URL of a store
VLM; freeze_config.unfreeze_modules: [{glob: '*'}] | 3 | freezing by selectors
QAT; PEFT | 2 | qat and peft cannot be combined
PEFT; peft.dim: 4; peft.r: 8 | 4 | peft.r is given twice
"""


@pytest.mark.parametrize(("items", "line", "what"), rows_of(REJECTED))
def test_a_key_of_a_missing_feature_is_an_error_with_its_line_and_a_hint(
    tmp_path: Path, items: str, line: str, what: str
) -> None:
    with pytest.raises(RecipeError) as error:
        load(tmp_path, written(items))
    (problem,) = [each for each in error.value.problems if what in each.what]
    assert problem.where == f"{tmp_path / 'theirs.yaml'}:{line}"
    assert problem.hint
    assert "nemo_automodel" not in problem.hint


def test_the_errors_name_the_feature_and_not_what_follows_from_its_absence(tmp_path: Path) -> None:
    text = f"dataset:\n  _target_: {DATA}.llm.mock_prefix_tree.make_trees\n  max_target_len: 3\n"
    with pytest.raises(RecipeError) as error:
        load(tmp_path, text + "comet:\n  project_name: p\n")
    assert len(error.value.problems) == 2


OVERRIDES = """
LLM | --model.pretrained_model_name_or_path other | model.from_pretrained: other
LLM | --model.from_pretrained other | model.from_pretrained: other
LLM | --step_scheduler.num_epochs null | step_scheduler.num_epochs: null
MEGATRON; step_scheduler.max_steps: 3 | --step_scheduler.num_epochs 2 | step_scheduler.num_epochs: 2
PEFT | --peft.dim 2 | peft.r: 2
PEFT; peft.dim: 4 | --peft.r 2 | peft.r: 2
PEFT | --peft null | peft: null
clip_grad_norm.max_norm: 2 | --clip_grad_norm 0.5 | clip_grad_norm: 0.5
clip_grad_norm.max_norm: 2 | --clip_grad_norm null | clip_grad_norm: null
LLM | --clip_grad_norm.max_norm 0.5 | clip_grad_norm: 0.5
LLM | --dataset.path_or_dataset other.jsonl | dataset.path: other.jsonl
packed_sequence.packed_sequence_size: 8 | --packed_sequence.size 64 | packed_sequence.size: 64
VALIDATION; step_scheduler.val_every_steps: 3 | --validation_dataset null | validation_dataset: null
LLM | --distributed.mixed_precision null | distributed.mixed_precision: null
wandb.enable: false; wandb.project: p | --wandb.enable true | logging.trackers: {wandb: {project: p}}
"""


@pytest.mark.parametrize(("items", "words", "translation"), rows_of(OVERRIDES))
def test_overrides_may_use_the_names_of_both_programs(
    tmp_path: Path, items: str, words: str, translation: str
) -> None:
    ((key, expected),) = values_of(translation).items()
    assert value_at(load(tmp_path, written(items), *words.split()), key) == expected


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
        (QWEN + "  torch_dtype: float32\n", "float32"),
        (DISTILLED + ADAM, None),
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
    text = converted(loaded)
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
        converted(load_recipe(recipe))


def test_the_converted_file_has_a_comment_for_each_changed_and_dropped_key(tmp_path: Path) -> None:
    text = converted(load(tmp_path, WHOLE))
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
        converted(loaded)


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


@pytest.mark.parametrize(
    "auto_class", ["nemo_automodel.NeMoAutoModelForSeq2SeqLM", "transformers.AutoModelForSeq2SeqLM"]
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
