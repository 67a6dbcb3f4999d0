"""Run by NeMo's Python: restore a .nemo file with a class around transformers' Llama, and report what it has.

``python restore_nemo.py FILE PREFIX STATE.safetensors REPORT.json``: writes the logits of the restored model for fixed
tokens, whether its state dict is bit-equal to STATE, and the number of artifacts that NeMo found.
"""

import json
import sys
from pathlib import Path

import torch
from nemo.core import ModelPT
from omegaconf import DictConfig
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM


class LlamaModel(ModelPT):
    """A Llama with a config and a tokenizer as artifacts."""

    def __init__(self, cfg: DictConfig, trainer: object = None) -> None:
        super().__init__(cfg=cfg, trainer=trainer)
        path = self.register_artifact("hf_config", cfg.hf_config)
        self.tokenizer_path = self.register_artifact(
            "tokenizer.tokenizer_json", cfg.tokenizer.tokenizer_json
        )
        self.llm = LlamaForCausalLM(LlamaConfig.from_json_file(path))

    def setup_training_data(self, config: object) -> None:
        pass

    def setup_validation_data(self, config: object) -> None:
        pass

    @classmethod
    def list_available_models(cls) -> list[object]:
        return []


def main(path: str, prefix: str, expected: str, report: str) -> None:
    """Restore *path* and write the report. Saves the model again next to it, with the suffix ``.again.nemo``."""
    model = LlamaModel.restore_from(path, map_location="cpu", strict=True).eval()
    state = model.state_dict()
    wanted = {prefix + name: value for name, value in load_file(expected).items()}
    is_equal = all(torch.equal(state[name], value) for name, value in wanted.items())
    with torch.no_grad():
        logits = model.llm(torch.arange(8).unsqueeze(0)).logits
    model.save_to(f"{path}.again.nemo")
    content = {
        "equal": is_equal and len(wanted) > 10,
        "artifacts": len(model.artifacts),
        "logits": logits.flatten().tolist(),
    }
    Path(report).write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
