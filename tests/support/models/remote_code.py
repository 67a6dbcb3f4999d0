"""A model directory with Python files of a type that transformers does not include."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models.sizes import model_sizes
from tests.support.models.small_tokenizer import small_tokenizer

CONFIGURATION = """\
import os
from transformers import LlamaConfig

with open(os.environ.get("RAN_LOG", os.devnull), "a") as file:
    file.write("configuration\\n")


class TwinConfig(LlamaConfig):
    model_type = "twin"
"""
MODELING = """\
from transformers import LlamaForCausalLM
from .configuration_twin import TwinConfig


class TwinForCausalLM(LlamaForCausalLM):
    config_class = TwinConfig
"""
TOKENIZATION = """\
from transformers import PreTrainedTokenizerFast


class TwinTokenizer(PreTrainedTokenizerFast):
    pass
"""
SETTINGS: dict[str, Any] = model_sizes(
    vocab=304, hidden=32, inner=48, layers=2, heads=4, kv_heads=2, positions=64
)


def make_remote_model(directory: Path, *, model_type: str = "twin") -> Path:
    """Write a Llama whose config names the classes of Python files beside it; the files append to $RAN_LOG."""
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**SETTINGS)).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_bytes())
    config["model_type"] = model_type
    config["architectures"] = ["TwinForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": "configuration_twin.TwinConfig",
        "AutoModelForCausalLM": "modeling_twin.TwinForCausalLM",
    }
    (directory / "config.json").write_text(json.dumps(config))
    small_tokenizer(300).save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    tokenizer = json.loads(path.read_bytes())
    tokenizer["tokenizer_class"] = "TwinTokenizer"
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "tokenization_twin.TwinTokenizer"]}
    path.write_text(json.dumps(tokenizer))
    (directory / "configuration_twin.py").write_text(CONFIGURATION)
    (directory / "modeling_twin.py").write_text(MODELING)
    (directory / "tokenization_twin.py").write_text(TOKENIZATION)
    return directory
