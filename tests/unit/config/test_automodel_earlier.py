"""Recipes of NeMo AutoModel's releases 0.1 to 0.5: without the key ``recipe``, and with names that have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.errors import RecipeError

NEMO = "nemo_automodel"
DATA = f"{NEMO}.components.datasets"
NAME = "pretrained_model_name_or_path: some/model\n"
MODEL = f"model:\n  _target_: {NEMO}.NeMoAutoModelForCausalLM.from_pretrained\n  {NAME}"
ROWS = f"""\
dataset:
  _target_: {DATA}.llm.hellaswag.HellaSwag
  path_or_dataset: rows.jsonl
"""
IMAGES = f"""\
dataset:
  _target_: {DATA}.vlm.datasets.make_medpix_dataset
  path_or_dataset: some/images
"""
MANAGER = f"distributed:\n  _target_: {NEMO}.components.distributed.fsdp2.FSDP2Manager\n"
PAIRS = f"""\
dataloader:
  dataset:
    _target_: {DATA}.llm.make_retrieval_dataset
    data_dir_list: pairs.json
    data_type: train
    train_n_passages: 3
  collate_fn:
    _target_: {DATA}.llm.RetrievalBiencoderCollator
    q_max_len: 64
"""


def model_of(target: str, more: str = "") -> str:
    return f"model:\n  _target_: {target}\n  {NAME}{more}"


BI_ENCODER = model_of(
    f"{NEMO}.components.models.biencoder.NeMoAutoModelBiencoder.from_pretrained",
    "  t: 0.5\n  l2_normalize: true\n  share_encoder: true\n  do_gradient_checkpointing: true\n",
)
TEACHER = f"teacher_model:\n  _target_: {NEMO}.NeMoAutoModelForCausalLM.from_pretrained\n  {NAME}"
OWN_CLASS = f"{NEMO}.components.models.qwen3_moe.model.Qwen3MoeForCausalLM"
OMNI = "transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained"


def load(tmp_path: Path, *sections: str) -> Any:
    recipe = tmp_path / "theirs.yaml"
    recipe.write_text("".join(sections))
    return load_recipe(recipe).config


@pytest.mark.parametrize(
    ("sections", "recipe"),
    [
        ((MODEL, ROWS), "llm_finetune"),
        ((model_of(f"{OWN_CLASS}.from_pretrained"), ROWS), "llm_finetune"),
        (
            (model_of(f"{NEMO}.components.models.llama.model.build_llama_model"), ROWS),
            "llm_finetune",
        ),
        ((model_of(OMNI), IMAGES), "vlm_finetune"),
        (
            (model_of(f"{NEMO}.NeMoAutoModelForMultimodalLM.from_pretrained"), IMAGES),
            "vlm_finetune",
        ),
        ((MODEL, TEACHER, ROWS), "distill"),
        ((BI_ENCODER, PAIRS), "embedding"),
    ],
)
def test_the_classes_of_model_and_data_state_which_recipe_a_file_is_for(
    tmp_path: Path, sections: tuple[str, ...], recipe: str
) -> None:
    config = load(tmp_path, *sections)
    assert config.recipe == recipe
    assert config.model.from_pretrained == "some/model"


def test_a_benchmark_is_recognized_by_its_section(tmp_path: Path) -> None:
    fresh = model_of(f"{OWN_CLASS}.from_config")
    config = load(tmp_path, fresh, ROWS, "benchmark:\n  warmup_steps: 2\n")
    assert config.throughput.warmup_steps == 2
    assert not config.checkpoint.enabled
    assert config.model.from_config == "some/model"


def test_pairs_were_in_the_section_of_the_loader(tmp_path: Path) -> None:
    config = load(tmp_path, BI_ENCODER, PAIRS)
    assert config.embedding.temperature == 0.5
    assert config.model.activation_checkpointing is True
    assert config.dataset.kwargs["num_negatives"] == 2
    assert config.dataset.kwargs["query_length"] == 64


def test_a_separate_encoder_of_documents_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="share_encoder: a separate encoder for documents"):
        load(tmp_path, BI_ENCODER.replace("share_encoder: true", "share_encoder: false"), PAIRS)


def test_a_manager_had_its_pipeline_and_activation_checkpointing_beside_it(tmp_path: Path) -> None:
    pipeline = (
        f"autopipeline:\n  _target_: {NEMO}.components.distributed.pipelining.AutoPipeline\n"
        "  pp_schedule: gpipe\n  pp_microbatch_size: 2\n"
    )
    parallelizer = (
        f"parallelizer:\n  _target_: {NEMO}.components.moe.parallelizer.parallelize_model\n"
        "  activation_checkpointing: true\n"
    )
    steps = "step_scheduler:\n  local_batch_size: 4\n  global_batch_size: 8\n"
    stages = f"{MANAGER}  pp_size: 2\n  use_hf_tp_plan: false\n"
    config = load(tmp_path, MODEL, ROWS, stages, pipeline, parallelizer, steps)
    assert config.distributed.pp_schedule == "gpipe"
    assert config.step_scheduler.local_batch_size == 2
    assert config.model.activation_checkpointing is True
    # Releases since 0.3 ignore these sections.
    newer = stages.replace(
        f"_target_: {NEMO}.components.distributed.fsdp2.FSDP2Manager", "strategy: fsdp2"
    )
    config = load(tmp_path, MODEL, ROWS, newer, pipeline, parallelizer, steps)
    assert config.distributed.pp_schedule == "1f1b"
    assert config.step_scheduler.local_batch_size == 4
    assert config.model.activation_checkpointing is False


def test_the_class_of_a_manager_is_the_strategy(tmp_path: Path) -> None:
    managers = {"fsdp2.FSDP2Manager": "auto", "ddp.DDPManager": "ddp"}
    managers["megatron_fsdp.MegatronFSDPManager"] = "auto"
    for name, strategy in managers.items():
        section = f"distributed:\n  _target_: {NEMO}.components.distributed.{name}\n"
        assert load(tmp_path, MODEL, ROWS, section).distributed.strategy == strategy


def test_a_quantizer_of_torchao_was_named_by_its_class(tmp_path: Path) -> None:
    quantizer = (
        "qat:\n  enabled: true\n  quantizer:\n"
        "    _target_: torchao.quantization.qat.Int4WeightOnlyQATQuantizer\n    groupsize: 64\n"
    )
    config = load(tmp_path, MODEL, ROWS, quantizer)
    assert (config.qat.scheme, config.qat.group_size) == ("W4A16", 64)


def test_a_base_in_fp8_is_dequantized_without_a_key(tmp_path: Path) -> None:
    fp8 = "  quantization_config:\n    _target_: transformers.FineGrainedFP8Config\n    dequantize: true\n"
    config = load(tmp_path, MODEL, "  cache_dir: /models\n", fp8, ROWS)
    assert config.model.from_pretrained == "some/model"
    with pytest.raises(RecipeError, match=r"unknown key model\.quantization_config"):
        load(tmp_path, MODEL, fp8.replace("true", "false"), ROWS)
