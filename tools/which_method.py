"""Write the tables of docs/guides/which-method.md: the memory that --dry-run forecasts for methods, models and GPUs.

python -m tools.which_method    # minutes on two cores; needs no GPU
"""

from typing import Any

from automodel_ckpt import load_recipe
from automodel_ckpt.cli.launch.ranks import mesh_sizes
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.forecast.plan import ForecastDevice, plan
from tools.support import ROOT, table, write_block

PAGE = ROOT / "docs" / "guides" / "which-method.md"
GPUS = {24: 24, 48: 48, 80: 80, 141: 140}
"""The name of a GPU by its memory in GB -> its memory in GiB."""
USABLE = 0.97
NAMES = "model_type vocab_size hidden_size intermediate_size num_attention_heads head_dim num_hidden_layers"
MODELS = {
    "1B": ("llama", 128256, 2048, 8192, 32, 64, 16),
    "3B": ("llama", 128256, 3072, 8192, 24, 128, 28),
    "8B": ("llama", 128256, 4096, 14336, 32, 128, 32),
    "14B": ("qwen3", 151936, 5120, 17408, 40, 128, 40),
    "32B": ("qwen3", 151936, 5120, 25600, 64, 128, 64),
    "70B": ("llama", 128256, 8192, 28672, 64, 128, 80),
}
"""Llama 3.2 1B and 3B, Llama 3.1 8B and 70B, Qwen3 14B and 32B."""
OPTIMIZER = {"_target_": "automodel_ckpt.optim.adam8bit.AdamW8bit", "float32_weights": True}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, 8-bit AdamW": {"optimizer": OPTIMIZER},
    "LoRA": {"peft": {"r": 16, "base_dir": "base"}},
    "QLoRA": {"peft": {"r": 16, "base_dir": "base", "quantize_base": "nf4"}},
}
DATA = {"_target_": "automodel_ckpt.examples.data.mock.random_tokens", "vocab_size": 1000}


def forecast(model: str, method: str, num_gpus: int, num_layers: int) -> int:
    """Return the forecast of the bytes on each GPU, for *model* with another number of layers."""
    config = dict(zip(NAMES.split(), MODELS[model], strict=True))
    config |= {"num_hidden_layers": num_layers, "num_key_value_heads": 8}
    config["tie_word_embeddings"] = model in ("1B", "3B")
    is_8bit = "optimizer" in METHODS[method]
    given = {
        "model": {"from_config": config, "activation_checkpointing": "full"}
        | ({"dtype": "bfloat16"} if is_8bit else {}),
        "tokenizer": None,
        "dataset": {**DATA, "seq_length": 2048, "num_samples": 64},
        "step_scheduler": {"global_batch_size": 8, "max_steps": 1},
        "checkpoint": {"enabled": False},
    }
    loaded = load_recipe(given | METHODS[method])
    recipe = LLMFinetune(loaded.config, config_yaml=loaded.to_yaml())
    return plan(recipe, mesh_sizes(loaded, num_gpus), ForecastDevice("cuda")).memory.total


def cell(model: str, method: str, num_gpus: int) -> str:
    """Return the memory that each GPU needs, with the smallest GPU that has it."""
    # It is linear in the number of layers. A forecast of 80 layers takes a minute.
    two, four = (forecast(model, method, num_gpus, number) for number in (2, 4))
    needed = two + (four - two) // 2 * (int(MODELS[model][-1]) - 2)
    fitting = [name for name, gib in GPUS.items() if needed <= USABLE * gib * 2**30]
    size = f"{needed / 2**30:.0f}"
    return f"{size} of {fitting[0]}" if fitting else f"{size}: no"


if __name__ == "__main__":
    for number in (1, 8):
        rows = [[model, *(cell(model, each, number) for each in METHODS)] for model in MODELS]
        write_block(f"gpus-{number}", table(["model", *METHODS], rows), PAGE)
