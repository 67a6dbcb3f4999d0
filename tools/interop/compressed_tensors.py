"""vLLM loads exports: in the dtype of the model, and the quantized ones of ``--to compressed-tensors``."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from tools.interop.program import Check, Workplace, build_model

_PLAIN = "bfloat16"
# Mean distance of log probabilities from the same weights as floats. Only these two schemes round activations.
# vLLM's build for CPUs has no kernel for W8A16, "Quant type (uint8b128) not supported" (0.32).
_LARGEST = {"FP8_DYNAMIC": 0.2, "W8A8": 0.1, "W4A16": 0.05, _PLAIN: 0.05}
_SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.05,
    "max_position_embeddings": 128,
}


def checks(workplace: Workplace) -> Iterator[Check]:
    prompts = torch.randint(3, 256, (6, 40), generator=torch.Generator().manual_seed(1))
    source, imported = workplace.directory / "hf", workplace.directory / "imported"
    build_model(0, "llama", **_SIZES).bfloat16().save_pretrained(source)
    workplace.ckpt("import", source, imported)
    expected: dict[str, torch.Tensor] = {}
    for scheme in _LARGEST:
        target = workplace.directory / scheme
        quantized = ("--to", "compressed-tensors", "--scheme", scheme)
        workplace.ckpt("export", imported, *(() if scheme == _PLAIN else quantized), "-o", target)
        expected[scheme] = _log_probabilities(target, prompts)
    models = {scheme: str(workplace.directory / scheme) for scheme in _LARGEST}
    job = workplace.directory / "job.json"
    job.write_text(json.dumps({"models": models, "prompts": prompts.tolist()}))
    found = workplace.report("ask_vllm.py", job)
    for scheme, largest in _LARGEST.items():
        distance = (torch.tensor(found[scheme]) - expected[scheme]).abs().mean().item()
        what = f"vLLM loads {scheme}: log probabilities, compared with the same weights in transformers"
        yield Check(what, f"mean difference {distance:.3f}", distance <= largest)


def _log_probabilities(directory: Path, prompts: torch.Tensor) -> torch.Tensor:
    """Return the log probability of each token but the first, shape [prompts, tokens - 1]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        values = model(prompts).logits.float()[:, :-1].log_softmax(-1)
    chosen: torch.Tensor = values.gather(-1, prompts[:, 1:, None]).squeeze(-1)
    return chosen
