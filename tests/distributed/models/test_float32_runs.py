"""Runs and exports of a mixture in bfloat16 with routers that stay in float32."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.cli.ckpt import main
from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.models.small_tokenizer import small_tokenizer
from tests.support.runs.training import EXPORT, RECIPE, train, write_recipe

ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.mark.further
@pytest.mark.parametrize("adapters", [False, True], ids=["in full", "LoRA"])
def test_a_run_continues_exactly_and_its_export_has_the_types_of_the_base(
    adapters: bool, tmp_path: Path
) -> None:
    _, _, rest = RECIPE.partition("dataset:")
    base = tmp_path / "base"
    mixture(base)
    peft = "peft: {r: 2, target_modules: [q_proj, v_proj]}\n" if adapters else ""
    model = f"model: {{from_pretrained: {base}, dtype: bfloat16}}\n"
    recipe = write_recipe(tmp_path, f"seed: 7\n{model}{peft}dataset:{rest}")
    mixed = [] if not adapters else ["--distributed.mixed_precision=bfloat16"]
    trainings = []
    for name, last in (("whole", 3), ("parts", 2), ("parts", 3)):
        place = f"--checkpoint.checkpoint_dir={tmp_path / name}"
        steps = (f"--step_scheduler.max_steps={last}", "--lr_scheduler=null")
        trainings.append(partial(train, recipe, place, *steps, *mixed, EXPORT))
    whole, _, continued = ranks.run_each(trainings, 2)
    assert continued == whole
    exported = tmp_path / "whole/epoch_0_step_3/model/consolidated"
    if adapters:
        exported = tmp_path / "merged"
        assert main(["export", str(tmp_path / "whole"), "--merge", "--output", str(exported)]) == 0
    (file,) = exported.glob("*.safetensors")
    before, after = load_file(base / "model.safetensors"), load_file(file)
    types = {name: value.dtype for name, value in before.items()}
    assert {name: value.dtype for name, value in after.items()} == types
    assert types[ROUTER] == torch.float32
    read = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)
    assert read.get_parameter(ROUTER).dtype == torch.float32
    assert torch.equal(after[ROUTER], before[ROUTER]) == adapters
    if not adapters:
        check_casts(tmp_path / "whole", after)


def check_casts(run: Path, expected: dict[str, torch.Tensor]) -> None:
    """An export in 16 bits keeps in float32 what transformers does, bit for bit; others are cast."""
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        output = run.with_name(name)
        command = ["consolidate", str(run / "LATEST"), "--cast-dtype", name]
        assert main([*command, "--output", str(output)]) == 0
        (file,) = output.glob("*.safetensors")
        cast = load_file(file)
        kept = {key for key, value in cast.items() if value.dtype == torch.float32}
        assert ROUTER in kept and len(kept) < len(cast)
        for key, value in cast.items():
            assert torch.equal(value, expected[key].to(torch.float32 if key in kept else dtype))
        read = AutoModelForCausalLM.from_pretrained(output, dtype=dtype)
        assert torch.equal(read.get_parameter(ROUTER), expected[ROUTER])


def mixture(directory: Path) -> None:
    """A mixture in bfloat16 with its tokenizer. transformers keeps its routers in float32."""
    config = AutoConfig.for_model(
        "ernie4_5_moe",
        **model_sizes(vocab=304, hidden=16, inner=16, layers=2, heads=2, kv_heads=1),
        moe_num_experts=4,
        moe_intermediate_size=8,
        moe_k=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    read = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    read.save_pretrained(directory)
    small_tokenizer(vocab_size=300).save_pretrained(directory)
