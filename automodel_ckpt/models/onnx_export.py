"""A language model of Hugging Face files as ONNX, by torch's exporter."""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from automodel_ckpt.models.config_checks import is_whole_seq2seq
from automodel_ckpt.models.error_texts import first_line

INPUTS = ("input_ids", "attention_mask")
OUTPUT = "logits"
# Protocol buffers of more than 2 GiB cannot be read; the graph itself takes some space, too.
_MAX_EMBEDDED_BYTES = 1 << 30
# The lengths of the example are not in the graph, but different ones keep the exporter from taking them as equal.
_EXAMPLE = (2, 12)


class _Logits(nn.Module):
    """The model with two inputs and one output, and without a cache of keys and values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the logits, of shape [batch, sequence, vocabulary]."""
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        logits: torch.Tensor = output.logits
        return logits


def require_onnx() -> None:
    """Raise :class:`RecipeError` if the packages that torch's exporter needs are missing."""
    for name in ("onnxscript", "onnx"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise RecipeError(
                f"exporting ONNX needs the package {name}",
                where="ckpt export --to onnx",
                value=str(error),
                hint="pip install 'automodel_ckpt[onnx]'",
            ) from error


def export_to_onnx(directory: Path, target: Path, dtype: str) -> None:
    """Write the model in the Hugging Face files of *directory* as the file *target*, which ends in ``.onnx``.

    Weights are cast to *dtype*, the name of a dtype of torch.

    Inputs are ``input_ids`` and ``attention_mask``, of shape [batch, sequence], both int64; the output is ``logits``,
    of shape [batch, sequence, vocabulary]. Batch and sequence can have any length. Weights of a gigabyte or more are
    in ``TARGET.data``. Memory: about three times the weights.

    Raises :class:`CheckpointUnusable` for a model that has no such inputs, or that the exporter cannot trace.
    """
    model = _load(directory, dtype)
    ids = torch.arange(_EXAMPLE[0] * _EXAMPLE[1]).reshape(_EXAMPLE) % model.config.vocab_size
    mask = torch.ones_like(ids)
    dimensions = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                _Logits(model),
                (ids, mask),
                input_names=list(INPUTS),
                output_names=[OUTPUT],
                dynamic_shapes=dict.fromkeys(INPUTS, dimensions),
                dynamo=True,
                verbose=False,
            )
    # The exporter raises its own classes, and those of the tracer.
    except Exception as error:
        raise CheckpointUnusable(
            "torch cannot export this model to ONNX",
            where=str(directory),
            value=f"{type(error).__name__}: {first_line(error, 3)}",
            hint="export Hugging Face files (--to hf), and convert them with the optimum library",
        ) from error
    finally:
        quiet.setLevel(level)
    program.save(target, external_data=nbytes >= _MAX_EMBEDDED_BYTES)


def _load(directory: Path, dtype: str) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        if is_whole_seq2seq(config):
            # transformers would load the decoder alone.
            raise ValueError(f"a {config.model_type} model has an encoder and a decoder")
        # Fused attention has kernels that the exporter does not know.
        model = load(directory, dtype=dtype, attn_implementation="eager", local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointUnusable(
            "only causal language models of transformers are exported to ONNX",
            where=str(directory),
            value=str(error).strip()[:300],
            hint="export Hugging Face files (--to hf), and convert them with the optimum library",
        ) from error
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in INPUTS if name not in parameters]
    if missing:
        raise CheckpointUnusable(
            "the model has no such input",
            where=str(directory),
            value=missing[0],
            hint="export Hugging Face files (--to hf), and convert them with the optimum library",
        )
    return model
