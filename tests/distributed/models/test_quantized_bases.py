"""Bases in FP8 and MXFP4: each rank dequantizes its shards while it reads them, as transformers does for the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.models.build import build_model
from automodel_ckpt.parallel.parallelize import Parallelism, parallelize
from automodel_ckpt.training.model.deferred_model import build_deferred
from tests.support import ranks
from tests.support.models.small_tokenizer import small_tokenizer
from tests.support.runs.parallel import layout_here
from tests.support.runs.training import EXPORT, RECIPE, train, write_recipe

SIZES: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, num_experts=4, head_dim=16),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        **MOE,
        **LATENT,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
}
BLOCK = 16


def to_fp8(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """*value* in blocks of 16 x 16 in FP8, as DeepSeek-V3's files have it."""
    rows, columns = (extent // BLOCK for extent in value.shape)
    blocks = value.float().reshape(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-6) / 448
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).reshape(value.shape)
    return {name: values, f"{name}_scale_inv": scales}


def to_fp8_per_tensor(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = (value.float().abs().max() / 448).to(torch.bfloat16)
    values = (value.float() / scale.float()).to(torch.float8_e4m3fn)
    return {
        name: values,
        f"{name}_scale": scale.reshape(1),
        f"{name[:-6]}input_scale": scale.clone(),
    }


def to_mxfp4(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random blocks and scales for a tensor of the shape of *value*."""
    experts, inputs, outputs = value.shape
    shape = (experts, outputs, inputs // 32)
    return {
        f"{name}_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8),
        f"{name}_scales": torch.randint(115, 125, shape, dtype=torch.uint8),
    }


FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8": (to_fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "compressed-tensors": (
        to_fp8_per_tensor,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
                }
            },
            "ignore": ["lm_head"],
        },
    ),
    "mxfp4": (to_mxfp4, {"quant_method": "mxfp4"}),
}
CASES = [
    ("llama", "fp8", "bfloat16"),
    ("qwen3_moe", "fp8", "bfloat16"),
    ("deepseek_v3", "fp8", "bfloat16"),
    ("gpt_oss", "mxfp4", "bfloat16"),
    ("llama", "compressed-tensors", "bfloat16"),
]


def is_quantized(name: str, value: torch.Tensor, method: str) -> bool:
    if method == "mxfp4":
        return value.dim() == 3 and "experts" in name
    is_layer = "proj" in name and value.dim() == 2
    return is_layer and all(extent % BLOCK == 0 for extent in value.shape)


def make_base(directory: Path, family: str, method: str) -> Path:
    """Write a model in bfloat16 whose layers are quantized."""
    torch.manual_seed(4)
    config = CONFIGS[family]
    small_tokenizer(300).save_pretrained(directory)
    make: Any = AutoModelForCausalLM.from_config
    make(config, dtype=torch.bfloat16).save_pretrained(directory)
    quantize, settings = FORMATS[method]
    stored: dict[str, torch.Tensor] = {}
    for name, value in load_file(directory / "model.safetensors").items():
        new = quantize(name, value) if is_quantized(name, value, method) else {name: value}
        stored |= new
    if family == "deepseek_v3":
        # transformers ignores the layer that predicts a second token.
        stored["model.layers.61.eh_proj.weight"] = torch.ones(2, 2)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    content = json.loads((directory / "config.json").read_bytes())
    content["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def expected(directory: Path, method: str, dtype: str) -> dict[str, torch.Tensor]:
    """What transformers reads; for compressed-tensors, the product in a few lines of torch."""
    config = AutoConfig.from_pretrained(directory)
    if method != "compressed-tensors":
        model = build_model(config, from_pretrained=str(directory), dtype=dtype)
        return dict(model.state_dict())
    values: dict[str, torch.Tensor] = {}
    stored = load_file(directory / "model.safetensors")
    for name, value in stored.items():
        if f"{name}_scale" in stored:
            value = value.float() * stored[f"{name}_scale"].float()
        if "scale" not in name:
            values[name] = value.to(getattr(torch, dtype))
    return values


def read_in_parts(root: Path) -> list[dict[str, torch.Tensor] | None]:
    """The values that two ranks read of each case with fsdp2; None if each rank built the complete model."""
    found: list[dict[str, torch.Tensor] | None] = []
    for family, method, dtype in CASES:
        directory = root / f"{family}-{method}"
        section = ModelConfig(from_pretrained=str(directory), dtype=dtype)  # type: ignore[arg-type]
        deferred = build_deferred(
            section,
            AutoConfig.from_pretrained(directory),
            base=str(directory),
            auto_class=AutoModelForCausalLM,
            seed=5,
            group=dist.group.WORLD,
        )
        if deferred.materialise is None:
            found.append(None)
            continue
        model: Any = parallelize(deferred.model, layout_here(), Parallelism(), deferred.materialise)
        assert not hasattr(model.config, "quantization_config")
        values: dict[str, torch.Tensor] = {}
        for name, value in model.state_dict().items():
            values[name] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
        found.append(values)
    return found


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    root = tmp_path_factory.mktemp("quantized")
    for family, method, _ in CASES:
        if not (root / f"{family}-{method}").exists():
            make_base(root / f"{family}-{method}", family, method)
    return root, ranks.run(read_in_parts, 2, root, timeout=120)[0]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_shards_of_two_ranks_are_what_transformers_dequantizes(
    read: tuple[Path, list[Any]], case: tuple[str, str, str]
) -> None:
    root, found = read
    family, method, dtype = case
    values = found[CASES.index(case)]
    assert values is not None, "each rank built the complete model"
    wanted = expected(root / f"{family}-{method}", method, dtype)
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        assert values[name].dtype == value.dtype, name
        assert torch.equal(values[name], value), name


ADAPTERS = [
    ("gpt_oss", "mxfp4", "all-experts"),
    ("llama", "compressed-tensors", "[]"),
]


@pytest.fixture(scope="module")
def adapters(
    read: tuple[Path, list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Runs with adapters on quantized bases: {family: directory of checkpoints}."""
    root = tmp_path_factory.mktemp("adapters")
    _, _, rest = RECIPE.partition("dataset:")
    recipes: dict[str, Path] = {}
    for family, method, experts in ADAPTERS:
        base = read[0] / f"{family}-{method}"
        peft = f"{{r: 2, target_modules: [q_proj], target_parameters: {experts}}}"
        text = f"seed: 7\nmodel: {{from_pretrained: {base}, dtype: bfloat16}}\npeft: {peft}\n"
        (root / family).mkdir()
        recipes[family] = write_recipe(root / family, f"{text}dataset:{rest}")

    def all_families() -> None:
        for recipe in recipes.values():
            place = f"--checkpoint.checkpoint_dir={recipe.parent / 'run'}"
            train(recipe, place, "--step_scheduler.max_steps=2", "--lr_scheduler=null")

    ranks.run(all_families, 1, init=False, timeout=120)
    return {family: recipe.parent / "run" for family, recipe in recipes.items()}


@pytest.mark.parametrize(("family", "method"), [case[:2] for case in ADAPTERS])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_on_a_quantized_base_are_merged_into_ordinary_files(
    read: tuple[Path, list[Any]],
    adapters: dict[str, Path],
    family: str,
    method: str,
    tmp_path: Path,
) -> None:
    from peft import PeftModel

    merged = tmp_path / "merged"
    assert main(["export", str(adapters[family]), "--merge", "--output", str(merged)]) == 0
    assert "quantization_config" not in json.loads((merged / "config.json").read_bytes())
    found: Any = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.bfloat16)
    config = AutoConfig.from_pretrained(read[0] / f"{family}-{method}")
    del config.quantization_config
    base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.load_state_dict(expected(read[0] / f"{family}-{method}", method, "bfloat16"))
    before = {name: value.clone() for name, value in base.state_dict().items()}
    adapted = PeftModel.from_pretrained(base.float(), adapters[family] / "LATEST" / "model")
    wanted = adapted.merge_and_unload().state_dict()
    assert found.state_dict().keys() == wanted.keys()
    changed: set[str] = set()
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value.float(), wanted[name], rtol=0.01, atol=1e-6)
        if not torch.equal(value, before[name]):
            changed.add(name.rpartition(".")[0].rpartition(".")[2])
    assert changed == ({"q_proj"} if family == "llama" else {"q_proj", "experts"})


def test_a_run_on_an_fp8_base_exports_ordinary_files(
    read: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    base = read[0] / "llama-fp8"
    _, _, rest = RECIPE.partition("dataset:")
    text = f"seed: 7\nmodel: {{from_pretrained: {base}, dtype: bfloat16}}\ndataset:{rest}"
    recipe = write_recipe(tmp_path, text)
    words = (
        f"--checkpoint.checkpoint_dir={tmp_path / 'run'}",
        "--step_scheduler.max_steps=1",
        "--optimizer.lr=0",
        EXPORT,
    )
    ranks.run(lambda: train(recipe, *words), 1, init=False, timeout=120)
    export = tmp_path / "run" / "LATEST" / "model" / "consolidated"
    assert "quantization_config" not in json.loads((export / "config.json").read_bytes())
    (file,) = export.glob("*.safetensors")
    exported = load_file(file)
    wanted = expected(base, "fp8", "bfloat16")
    assert exported.keys() == wanted.keys()
    for name, value in exported.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, wanted[name])
