"""Adapters on fused experts (peft.target_parameters): training, resuming, loading with peft, merging."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import RecipeError
from tests.distributed.models.test_peft import assert_is_whole
from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.runs.training import RECIPE, Recipe, train, write_recipe
from tests.support.runs.training_parts import TOKENS, WithLogits

SIZES: dict[str, Any] = {
    **model_sizes(vocab=300, hidden=16, inner=24, layers=2, heads=4, kv_heads=2, positions=32),
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=3, head_dim=4, moe_intermediate_size=8),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=3, head_dim=4),
}
PEFT = """\
model: {from_pretrained: BASE}
peft: {target_modules: [q_proj], target_parameters: [gate_up_proj, down_proj], r: 2}
"""
SHORT = (
    "--step_scheduler.max_steps=2",
    "--step_scheduler.ckpt_every_steps=1",
    "--step_scheduler.local_batch_size=2",
    "--lr_scheduler=null",
)


def recipe_in(directory: Path, family: str) -> Path:
    torch.manual_seed(9)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[family])
    model.save_pretrained(directory / "base")
    _, _, rest = RECIPE.partition("tokenizer:")
    text = PEFT.replace("BASE", str(directory / "base")) + "seed: 7\ntokenizer:" + rest
    return write_recipe(directory, text)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs of each family on two ranks with fsdp2: the directory, and each rank's digests by family."""
    root = tmp_path_factory.mktemp("experts")
    trainings = []
    for family in CONFIGS:
        (root / family).mkdir()
        place = f"--checkpoint.checkpoint_dir={root / family / 'whole'}"
        recipe = recipe_in(root / family, family)
        trainings.append(partial(train, recipe, place, *SHORT, recipe_class=WithLogits))
    return root, dict(zip(CONFIGS, ranks.run_each(trainings, 2), strict=True))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_peft_loads_the_adapter_and_computes_the_same_and_so_does_the_merged_model(
    runs: Any, family: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    root, _ = runs
    run = root / family / "whole"
    logits = torch.load(run / "logits.pt")
    base: Any = AutoModelForCausalLM.from_pretrained(root / family / "base")
    with torch.no_grad():
        assert not torch.equal(base(input_ids=TOKENS).logits, logits)
    adapter = run / "LATEST" / "model"
    trained = load_file(adapter / "adapter_model.safetensors")
    assert len([name for name in trained if ".experts." in name]) == 8
    assert all(value.abs().sum() > 0 for value in trained.values())
    loaded = PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, logits, rtol=1e-5, atol=1e-6)
    assert main(["export", str(run), "--merge", "--output", str(tmp_path / "merged")]) == 0
    assert_is_whole(tmp_path / "merged", logits)
    merged = load_file(tmp_path / "merged" / "model-00001-of-00001.safetensors")
    stored = load_file(root / family / "base" / "model.safetensors")
    assert {name: value.shape for name, value in merged.items()} == {
        name: value.shape for name, value in stored.items()
    }
    whole = loaded.merge_and_unload().state_dict()
    reloaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, value in reloaded.state_dict().items():
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "pattern", "message"),
    [
        ("qwen3_moe", "gate_up", "there are gate_up_proj, down_proj"),
        ("gpt_oss", "gate_up_proj_bias", "no parameter with three dimensions"),
    ],
)
def test_a_name_that_matches_no_experts_is_an_error(
    tmp_path: Path, family: str, pattern: str, message: str
) -> None:
    recipe = recipe_in(tmp_path, family)
    with pytest.raises(RecipeError, match=r"peft\.target_parameters") as caught:
        train(recipe, f"--peft.target_parameters=[{pattern}]", "--checkpoint.enabled=false")
    assert message in str(caught.value)


@pytest.mark.further
def test_a_run_with_adapters_on_experts_resumes_bit_for_bit(runs: Any) -> None:
    root, digests = runs
    trainings = []
    for family in CONFIGS:
        place = f"--checkpoint.checkpoint_dir={root / family / 'resumed'}"
        saved = f"--checkpoint.restore_from={root / family / 'whole/epoch_0_step_1'}"
        recipe = root / family / "recipe.yaml"
        trainings.append(partial(train, recipe, place, saved, *SHORT, recipe_class=Recipe))
    assert ranks.run_each(trainings, 2) == list(digests.values())
