"""Bases in FP8 and MXFP4: each rank dequantizes its shards while it reads them, as transformers does for the whole."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from automodel_ckpt.cli.ckpt import main
from tests.support import ranks
from tests.support.models.sizes import model_sizes
from tests.support.models.small_tokenizer import small_tokenizer
from tests.support.runs.training import EXPORT, RECIPE, train, write_recipe

SIZES: dict[str, Any] = model_sizes(
    vocab=304, hidden=64, inner=96, layers=2, heads=4, kv_heads=2, positions=32
)
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
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
    if method != "compressed-tensors":
        config = AutoConfig.from_pretrained(directory)
        config.quantization_config["dequantize"] = True
        read: Any = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=dtype)
        return dict(read.state_dict())
    values: dict[str, torch.Tensor] = {}
    stored = load_file(directory / "model.safetensors")
    for name, value in stored.items():
        if f"{name}_scale" in stored:
            value = value.float() * stored[f"{name}_scale"].float()
        if "scale" not in name:
            values[name] = value.to(getattr(torch, dtype))
    return values


_, _, REST = RECIPE.partition("dataset:")


def recipe_on(base: Path, place: Path, more: str = "") -> Path:
    """Write a recipe that trains *base*, in the directory *place*."""
    place.mkdir(parents=True)
    model = f"model: {{from_pretrained: {base}, dtype: bfloat16}}\n"
    return write_recipe(place, f"seed: 7\n{model}{more}dataset:{REST}")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bases of all cases."""
    directory = tmp_path_factory.mktemp("quantized")
    for family, method, _ in CASES:
        make_base(directory / f"{family}-{method}", family, method)
    return directory


@pytest.fixture(scope="module")
def exports(root: Path) -> dict[str, Path]:
    """What two ranks with fsdp2 export of each base after a step that changes nothing: {name: directory}."""
    trainings, found = [], {}
    for name in [f"{family}-{method}" for family, method, _ in CASES]:
        place = root / "runs" / name
        words = (
            f"--checkpoint.checkpoint_dir={place / 'run'}",
            "--step_scheduler.max_steps=1",
            "--optimizer.lr=0",
            "--distributed.strategy=fsdp2",
            EXPORT,
        )
        trainings.append(partial(train, recipe_on(root / name, place), *words))
        found[name] = place / "run/LATEST/model/consolidated"
    ranks.run_each(trainings, 2)
    return found


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_shards_of_two_ranks_are_what_transformers_dequantizes(
    root: Path, exports: dict[str, Path], case: tuple[str, str, str]
) -> None:
    family, method, dtype = case
    export = exports[f"{family}-{method}"]
    assert "quantization_config" not in json.loads((export / "config.json").read_bytes())
    log = (export.parents[2] / "log.txt").read_text()
    assert "each rank builds the complete model" not in log
    read: Any = AutoModelForCausalLM.from_pretrained(export, dtype="auto")
    values = read.state_dict()
    wanted = expected(root / f"{family}-{method}", method, dtype)
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        assert values[name].dtype == value.dtype, name
        assert torch.equal(values[name], value), name


ADAPTERS = [("gpt_oss", "mxfp4", "all-experts"), ("llama", "compressed-tensors", "[]")]


@pytest.fixture(scope="module")
def adapters(root: Path) -> dict[str, Path]:
    """Runs with adapters on quantized bases: {family: directory of checkpoints}."""
    recipes: dict[str, Path] = {}
    for family, method, experts in ADAPTERS:
        peft = f"peft: {{r: 2, target_modules: [q_proj], target_parameters: {experts}}}\n"
        recipes[family] = recipe_on(root / f"{family}-{method}", root / "adapters" / family, peft)

    def all_families() -> None:
        for recipe in recipes.values():
            place = f"--checkpoint.checkpoint_dir={recipe.parent / 'run'}"
            train(recipe, place, "--step_scheduler.max_steps=2", "--lr_scheduler=null")

    ranks.run(all_families, 1, init=False, timeout=120)
    return {family: recipe.parent / "run" for family, recipe in recipes.items()}


@pytest.mark.parametrize(("family", "method"), [case[:2] for case in ADAPTERS])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_on_a_quantized_base_are_merged_into_ordinary_files(
    root: Path, adapters: dict[str, Path], family: str, method: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    merged = tmp_path / "merged"
    assert main(["export", str(adapters[family]), "--merge", "--output", str(merged)]) == 0
    assert "quantization_config" not in json.loads((merged / "config.json").read_bytes())
    found: Any = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.bfloat16)
    config = AutoConfig.from_pretrained(root / f"{family}-{method}")
    del config.quantization_config
    base: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.load_state_dict(expected(root / f"{family}-{method}", method, "bfloat16"))
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
