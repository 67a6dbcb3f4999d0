"""The values of ``ckpt export --to``: a row for each. Imports no torch.

A row names the function that exports. Each of its options becomes the keyword argument of that function that the option
names, unless *supplied* has another value for it. A new target is a row here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.common.arguments import number_at_least
from automodel_ckpt.cli.targets import hf
from automodel_ckpt.cli.targets.target import (
    CAST_DTYPE,
    FORCE,
    NUM_THREADS,
    PREFIX,
    Option,
    Target,
    finish,
    log,
)
from automodel_ckpt.errors import RecipeError


def _nothing(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    return {}


def _no_details(report: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class _Row:
    """The *function* of ``convert/targets/`` (MODULE:NAME), and what a target needs in addition to its options."""

    function: str
    supplied: Callable[[argparse.Namespace, Path], Mapping[str, Any]] = _nothing
    details: Callable[[Any], str] = _no_details

    def run(
        self, options: tuple[Option, ...], arguments: argparse.Namespace, source: Path
    ) -> dict[str, Any]:
        """Export, and report as every target."""
        keywords = {option.keyword: getattr(arguments, option.attribute) for option in options}
        keywords |= self.supplied(arguments, source)
        source = keywords.pop("source", source)
        module, _, name = self.function.partition(":")
        export = getattr(import_module(f"automodel_ckpt.convert.targets.{module}"), name)
        report = export(source, arguments.output, **keywords, log=log)
        return finish(arguments, report, self.details(report))


def _target(
    name: str,
    summary: str,
    output: str,
    row: _Row,
    *options: Option,
    resumes: bool = False,
) -> Target:
    where = f"{output} next to the checkpoint"
    return Target(name, summary, where, partial(row.run, options), options, resumes)


# ---------------------------------------------------------------- what a target needs in addition to its options


def _scheme(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.convert.targets.compressed_tensors import SCHEMES

    if arguments.scheme not in SCHEMES:
        raise RecipeError(
            "compressed-tensors needs a scheme of quantization",
            where="ckpt export --scheme",
            value=arguments.scheme,
            hint=f"one of {', '.join(SCHEMES)}",
        )
    from automodel_ckpt.models.inspect.signature import linear_weights

    return {"linear_weights": linear_weights}


def _exporter(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    from automodel_ckpt.models.onnx_export import export_to_onnx, require_onnx

    require_onnx()
    return {"exporter": export_to_onnx}


def _trainer(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    """The intervals are those of the recipe in the checkpoint, and the Trainer's defaults for others."""
    from automodel_ckpt.checkpoint.files.layout import CONFIG
    from automodel_ckpt.cli.common.model_parameters import parameters_in
    from automodel_ckpt.cli.common.paths import whole_checkpoint
    from automodel_ckpt.config.help.changes import saved_recipe
    from automodel_ckpt.convert.targets.trainer import Intervals

    # As the other targets, it accepts the directory model/ of a checkpoint.
    source = whole_checkpoint(source)
    recipe = saved_recipe(source / CONFIG)
    found: dict[str, int] = {}
    for name, key in (
        ("micro_batch_size", "local_batch_size"),
        ("save_steps", "ckpt_every_steps"),
        ("eval_steps", "val_every_steps"),
    ):
        text = recipe.get(f"step_scheduler.{key}", "")
        # ckpt_every_steps may also be `auto` or null.
        if text.isdecimal() and 0 < int(text) < 2**31:
            found[name] = int(text)
    return {
        "source": source,
        "parameters_in": parameters_in,
        "intervals": Intervals(**found),
        "callbacks": arguments.callback or (),
    }


def _trainer_details(report: Any) -> str:
    return f"state of {counted(report.details['num_parameters'], 'parameter')}"


def _gguf_details(report: Any) -> str:
    from automodel_ckpt.checkpoint.export.next_steps import gguf_lines
    from automodel_ckpt.convert.targets.gguf import write_modelfile

    for line in gguf_lines(report.output, write_modelfile(report.output)):
        log(line)
    return ", ".join(f"{count} {name}" for name, count in report.details["kinds"].items())


def _quantized_details(report: Any) -> str:
    return f"{report.details['num_quantized']} of them quantized"


def _prefix(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    return {"prefix": arguments.prefix or ""}


def _module_prefix(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    return {"prefix": "model." if arguments.prefix is None else arguments.prefix}


def _compress(arguments: argparse.Namespace, source: Path) -> dict[str, Any]:
    return {"compress": arguments.compress == "true"}


# ---------------------------------------------------------------- the targets

_SCHEME = Option(
    "--scheme",
    "W8A8 (int8), W8A16 or W4A16 (integers, a scale per 128 columns), or FP8_DYNAMIC",
    {"metavar": "S"},
)
_NAMES = Option(
    "--names",
    "names of the tensors of a Llama: those that torchtitan loads (default: those of Hugging Face)",
    {"choices": ["torchtitan"]},
)
_TYPE = Option(
    "--type",
    "type of the tensors: F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0 (default: as stored)",
    {"metavar": "KIND"},
    "tensor_type",
)
_VOCABULARY_MULTIPLE = Option(
    "--vocabulary-multiple",
    "pad the rows of the embedding and the output layer with zeros to a multiple of N (default: 1, no padding)",
    {"type": int, "default": 1, "metavar": "N"},
)
_MODEL_CONFIG = Option(
    "--model-config",
    "config of the NeMo class, to which references to the tokenizer's files are added",
    {"metavar": "YAML", "type": Path},
)
_NEMO_CLASS = Option(
    "--target",
    "the NeMo class, as the key `target` of the config (default: none; NeMo 3 rejects classes of other packages)",
    {"metavar": "CLASS"},
    "model_class",
)
_MEGATRON_NAMES = Option(
    "--megatron-names",
    "write the tensors and the config of a GPT model of Megatron-Core, as NeMo 1 has them",
    {"action": "store_true"},
)
_TENSOR_PARALLEL = Option(
    "--tensor-parallel",
    "number of tensor-parallel ranks, each with its own file of weights (default: 1)",
    {"type": number_at_least(1), "default": 1, "metavar": "N"},
    "num_ranks",
)
_COMPRESS = Option(
    "--compress",
    "true: one .qnemo file; false: a directory (default: true)",
    {"choices": ("true", "false"), "default": "true"},
)
_CALLBACK = Option(
    "--callback",
    "class of a callback with state (ExportableState) that the Trainer will have; repeat for several. "
    "EarlyStoppingCallback is always among them",
    {"metavar": "CLASS", "action": "append"},
    "callbacks",
)

TARGETS: tuple[Target, ...] = (
    hf.TARGET,
    _target(
        "gguf",
        "one file for llama.cpp: Llama, Mistral, Qwen 2 and 3, SmolLM, Gemma 2 and 3",
        "NAME.gguf",
        _Row("gguf:export_gguf", details=_gguf_details),
        *(CAST_DTYPE, _TYPE, NUM_THREADS, FORCE),
    ),
    _target(
        "torch",
        "one state dict for torch.load",
        "NAME.pt",
        _Row("torch_file:export_torch", _prefix),
        *(CAST_DTYPE, FORCE, PREFIX),
    ),
    _target(
        "lightning",
        "a file that PyTorch Lightning's Trainer resumes from",
        "NAME.ckpt",
        _Row("lightning:export_lightning", _module_prefix),
        *(CAST_DTYPE, FORCE, PREFIX),
        resumes=True,
    ),
    _target(
        "trainer",
        "a checkpoint that transformers' Trainer resumes from",
        "checkpoint-N",
        _Row("trainer:export_trainer", _trainer, _trainer_details),
        _CALLBACK,
        resumes=True,
    ),
    _target(
        "dcp",
        "a directory for torch.distributed.checkpoint",
        "NAME-dcp",
        _Row("dcp:export_dcp", _prefix),
        *(CAST_DTYPE, PREFIX, _NAMES),
    ),
    _target(
        "compressed-tensors",
        "Hugging Face files with quantized linear layers, for vLLM and transformers",
        "NAME-SCHEME",
        _Row("compressed_tensors:export_compressed_tensors", _scheme, _quantized_details),
        *(_SCHEME, CAST_DTYPE),
    ),
    _target(
        "nemo",
        "a .nemo file for NeMo",
        "NAME.nemo",
        _Row("nemo:export_nemo", _prefix),
        *(CAST_DTYPE, FORCE, PREFIX, _MODEL_CONFIG, _NEMO_CLASS, _MEGATRON_NAMES),
    ),
    _target(
        "megatron",
        "a distributed checkpoint (torch_dist) for Megatron-Core",
        "NAME-megatron",
        _Row("megatron:export_megatron"),
        *(CAST_DTYPE, NUM_THREADS, _VOCABULARY_MULTIPLE),
    ),
    _target(
        "qnemo",
        "a checkpoint of TensorRT-LLM: Llama and Mistral, not quantized",
        "NAME.qnemo",
        _Row("tensorrt_llm:export_tensorrt_llm", _compress),
        *(CAST_DTYPE, FORCE, _TENSOR_PARALLEL, _COMPRESS),
    ),
    _target(
        "onnx",
        "model.onnx for onnxruntime: language models, without a cache of keys and values; classifiers; embeddings",
        "NAME-onnx",
        _Row("onnx:export_onnx", _exporter),
        *(CAST_DTYPE, NUM_THREADS),
    ),
)
"""All targets, in the order of ``--help``."""
