"""What null and auto mean in a recipe, by the type of the device; no test needs a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.parallel.mesh_sizes import RankLayout, Sizes, share_out
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.model.sections import (
    float32_precision,
    resolve_precision,
    with_parameter_type,
)
from tests.support.runs.training import build, write_recipe

ONE, TWO = share_out(1), share_out(2)
LORA = ("--peft={}", "--model.from_config=null", "--model.from_pretrained=some/base")
MODULE = ("--model={_target_: tests.contract.test_every_key.some_model}",)
OFFLOADS = (
    "--recipe=distill",
    "--distill={teacher: {from_pretrained: some/base}, offload_teacher: true}",
)
ADAFACTOR = ("--optimizer._target_=torch.optim.Adafactor",)


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def config_of(recipe_file: Path, *overrides: str) -> RecipeConfig:
    config: RecipeConfig = build(recipe_file, *overrides).config
    return config


def resolved(config: RecipeConfig, sizes: Sizes, device_type: str) -> tuple[Any, Any]:
    found = resolve_precision(config, sizes, device_type)
    assert resolve_precision(found, sizes, device_type) == found
    return found.distributed.mixed_precision, found.distributed.strategy


@pytest.mark.parametrize(
    ("overrides", "sizes", "on_cuda", "on_cpu"),
    [
        ((), ONE, ("bfloat16", "fsdp2"), ("none", "single")),
        ((), TWO, ("bfloat16", "fsdp2"), ("none", "fsdp2")),
        ((), share_out(2, tp_size=2), ("bfloat16", "fsdp2"), ("none", "single")),
        ((*LORA, "--peft.quantize_base=nf4"), TWO, ("bfloat16", "fsdp2"), ("none", "fsdp2")),
        ((*LORA, "--peft.quantize_base=int8"), ONE, ("bfloat16", "single"), ("none", "single")),
        ((*LORA, "--peft.quantize_base=int8"), TWO, ("bfloat16", "ddp"), ("none", "ddp")),
        (
            (*LORA, "--peft.quantize_base=int8"),
            share_out(4, dp_replicate_size=2),
            ("bfloat16", "fsdp2"),
            ("none", "fsdp2"),
        ),
        (("--distributed.strategy=ddp",), TWO, ("bfloat16", "ddp"), ("none", "ddp")),
        (("--distributed.mixed_precision=none",), ONE, ("none", "single"), ("none", "single")),
        (("--model.dtype=bfloat16",), ONE, ("none", "single"), ("none", "single")),
        ((*OFFLOADS, "--model.dtype=bfloat16"), ONE, ("none", "fsdp2"), ("none", "single")),
        ((*LORA, "--model.dtype=bfloat16"), ONE, ("bfloat16", "fsdp2"), ("none", "single")),
        (("--model.dtype=float64",), TWO, ("none", "fsdp2"), ("none", "fsdp2")),
        (MODULE, ONE, ("bfloat16", "single"), ("none", "single")),
        (ADAFACTOR, ONE, ("bfloat16", "single"), ("none", "single")),
        (ADAFACTOR, TWO, ("bfloat16", "ddp"), ("none", "ddp")),
    ],
)
def test_a_gpu_computes_in_bfloat16_and_a_cpu_in_the_type_of_the_weights(
    recipe_file: Path, overrides: tuple[str, ...], sizes: Sizes, on_cuda: Any, on_cpu: Any
) -> None:
    config = config_of(recipe_file, *overrides)
    assert resolved(config, sizes, "cuda") == on_cuda
    assert resolved(config, sizes, "cpu") == on_cpu


def test_what_trains_is_kept_in_float32_and_a_frozen_base_on_a_gpu_in_16_bits(
    recipe_file: Path,
) -> None:
    class Base:
        dtype = torch.float16

    config = config_of(recipe_file)
    given = config_of(recipe_file, "--model.dtype=float32")
    base: Any = Base()

    def kept(config: Any, device_type: str, base: Any, is_frozen: bool) -> str:
        typed: Any = with_parameter_type(
            config, base, device_type=device_type, is_trained=not is_frozen
        )
        return str(typed.model.dtype)

    assert kept(config, "cuda", None, False) == "float32"
    assert kept(config, "cuda", None, True) == "bfloat16"
    assert kept(config, "cuda", base, True) == "float16"
    assert kept(config, "cpu", base, True) == "float32"
    assert kept(given, "cuda", base, True) == "float32"


def test_float32_products_use_tf32_on_a_gpu_unless_the_run_is_deterministic(
    recipe_file: Path,
) -> None:
    assert float32_precision(config_of(recipe_file), "cuda") == "high"
    assert float32_precision(config_of(recipe_file, "--deterministic=true"), "cuda") == "highest"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"base": torch.bfloat16, "adapter": torch.float32, "copy": torch.float32}),
        (
            ("--peft.dtype=base",),
            {"base": torch.bfloat16, "adapter": torch.bfloat16, "copy": torch.bfloat16},
        ),
        (
            ("--model.dtype=float32",),
            {"base": torch.float32, "adapter": torch.float32, "copy": torch.float32},
        ),
    ],
)
def test_adapters_on_a_gpu_train_in_float32_beside_a_base_in_bfloat16(
    tmp_path: Path, recipe_file: Path, overrides: tuple[str, ...], expected: dict[str, Any]
) -> None:
    peft = f"--peft={{base_dir: {tmp_path / 'base'}, modules_to_save: [lm_head]}}"
    untied = "--model.from_config.tie_word_embeddings=false"
    recipe = build(recipe_file, peft, untied, *overrides, recipe_class=LLMFinetune)
    # A dry run allocates nothing on the device.
    recipe.is_dry_run = True
    recipe.layout = RankLayout(0, ONE, 0, torch.device("cuda"), None)  # type: ignore[arg-type]
    recipe.build()
    trainable = recipe.trainable
    found = {}
    for name, parameter in trainable.model.named_parameters():
        kind = "adapter" if "lora_" in name else "copy" if "modules_to_save" in name else "base"
        assert parameter.requires_grad == (kind != "base")
        found.setdefault(kind, parameter.dtype)
        assert parameter.dtype == found[kind]
    assert found == expected
    assert "float32 products in TF32" in trainable.precision
