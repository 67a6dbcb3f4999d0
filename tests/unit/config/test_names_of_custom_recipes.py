"""The names that custom recipes import: they stay where they are, in whichever module they are defined."""

import importlib

import pytest

NAMES = {
    "config.schema": "AT_LEAST_1 FINITE FRACTION NOT_EMPTY POSITIVE Rule setting Target "
    "RecipeConfig CheckpointConfig MemoryConfig RemoteConfig OptimizerConfig StepSchedulerConfig",
    "base.rng": "StatefulRNG",
    "config.rules": "AT_LEAST_0 AT_LEAST_1 FINITE FRACTION Rule setting Target",
    "config.targets": "build build_function callable_of prepare check_targets",
    "recipes.llm_finetune": "LLMFinetune",
    "recipes.vlm_finetune": "VLMFinetune",
    "recipes.dpo": "DPO DPOFinetune",
    "recipes.base": "FinetuneRecipe",
    "recipes.loop": "TrainingLoop",
    "training.loop": "TrainingLoop",
    "training.adam8bit": "AdamW8bit",
    "recipes.objective": "Objective",
    "recipes.recipe": "Recipe",
    "loss.contrastive": "contrastive_losses ranks_of",
    "loss.listwise": "listwise_losses",
    "models.inspect.error_texts": "naming_files",
    "models.inspect.vision": "AutoMultimodalModel image_token_ids",
    "training.kinds.embedding_checks": "UNSUPPORTED check_attention see_both_ways with_backbone",
    "training.kinds.embedding_pairs": "PairsOverRanks Parts num_pairs_of own_candidates parts_of",
    "checkpoint": "Checkpointer CheckpointOptions HFAssets Manifest",
    "checkpoint.module_tensors": "unwrap",
    "errors": "Problem RecipeError",
}


@pytest.mark.parametrize("module", NAMES)
def test_the_names_of_a_module(module: str) -> None:
    found = importlib.import_module(f"automodel_ckpt.{module}")
    for name in NAMES[module].split():
        assert hasattr(found, name)
        assert name in getattr(found, "__all__", [name])
