"""A model of Hugging Face files as ONNX, by torch's exporter."""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from automodel_ckpt.checkpoint.files.type_aliases import Strings, ValueDict
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from automodel_ckpt.models.inspect.interface import first_line
from automodel_ckpt.models.inspect.signature import model_class

_HINT = "export Hugging Face files (--to hf), and convert them with the optimum library"
_INPUTS = ("input_ids", "attention_mask")
# Encoders such as BERT distinguish the texts of a pair by it.
_SEGMENTS = "token_type_ids"
_LOGITS = "logits"
_HIDDEN = "last_hidden_state"
_GENERATORS = ("ForCausalLM", "LMHeadModel")
_WITH_LOGITS = (
    *_GENERATORS,
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
)
_BACKBONE = "Model"
# The lengths of the example are not in the graph, but different ones keep the exporter from taking them as equal.
_EXAMPLE = (2, 12)
_NO_CACHE = (
    "the model has no cache of keys and values: a program that generates text computes the whole text again for each "
    "token"
)
_NO_POOLING = f"the output is {_HIDDEN}: pooling and normalization are not part of the model"


class _OneOutput(nn.Module):
    """The model with positional inputs and one output, and without a cache of keys and values."""

    def __init__(self, model: nn.Module, inputs: Strings, output: str) -> None:
        super().__init__()
        self.model = model
        self._inputs, self._output = inputs, output
        accepts_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._options: ValueDict = {"use_cache": False} if accepts_cache else {}

    def forward(self, *values: Tensor) -> Tensor:
        """Return the output of the model for the *values* of its inputs, in order."""
        inputs = dict(zip(self._inputs, values, strict=True))
        return self.model(**inputs, **self._options)[self._output]  # type: ignore[no-any-return]


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


def export_to_onnx(directory: Path, target: Path, dtype: str) -> str:
    """Write the model in the Hugging Face files of *directory* as the file *target*, which ends in ``.onnx``.

    The model is of the class that config.json names. Weights are cast to *dtype*, the name of a dtype of torch. Inputs
    are ``input_ids``, ``attention_mask``, and for encoders with segments ``token_type_ids``, of shape [batch,
    sequence], all int64. The output of a model with a head is ``logits``. The output of a backbone is
    ``last_hidden_state``. Batch and sequence can have any length. Weights of 1.5 GiB or more are in ``TARGET.data``.
    Memory: about three times the weights.

    Returns:
        What a user of the file must know, as a sentence; empty for nothing.

    Raises:
        CheckpointUnusable: for a kind of model that has other inputs or outputs, for files with other tensors than the
            class, and for a model that the exporter cannot trace.
    """
    model, output = _load(directory, dtype)
    parameters = inspect.signature(model.forward).parameters
    inputs: Strings = _INPUTS
    if _SEGMENTS in parameters and getattr(model.config, "type_vocab_size", 0) > 1:
        inputs = (*_INPUTS, _SEGMENTS)
    if lacking := [name for name in inputs if name not in parameters]:
        raise _unusable("the model has no such input", directory, lacking[0])
    ids = torch.arange(_EXAMPLE[0] * _EXAMPLE[1]).reshape(_EXAMPLE) % model.config.vocab_size
    examples = [ids, *(torch.ones_like(ids) for _ in inputs[1:])]
    if _SEGMENTS in inputs:
        examples[-1] = torch.zeros_like(ids)
    dimensions = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    quiet = logging.getLogger("torch.onnx")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                _OneOutput(model, inputs, output),
                tuple(examples),
                input_names=list(inputs),
                output_names=[output],
                dynamic_shapes=(tuple(dimensions for _ in inputs),),
                dynamo=True,
                verbose=False,
            )
    # The exporter raises its own classes, and the tracer's.
    except Exception as error:
        what = "torch cannot export this model to ONNX"
        value = f"{type(error).__name__}: {first_line(error)}"
        raise _unusable(what, directory, value) from error
    finally:
        quiet.setLevel(level)
    program.save(target)
    if output == _HIDDEN:
        return _NO_POOLING
    return _NO_CACHE if type(model).__name__.endswith(_GENERATORS) else ""


def _load(directory: Path, dtype: str) -> tuple[Any, str]:
    """Return the model of the class that config.json names, and the name of its output."""
    what = "this kind of model is not exported to ONNX"
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        found: Any = model_class(config)
        name = found.__name__
        output = _LOGITS if name.endswith(_WITH_LOGITS) else _HIDDEN
        is_known = name.endswith((*_WITH_LOGITS, _BACKBONE))
        # With an encoder and a decoder, or several modalities, a model has further inputs.
        if not is_known or config.is_encoder_decoder or config.get_text_config() is not config:
            raise _unusable(what, directory, name)
        # Fused attention has kernels that the exporter does not know.
        model, differences = found.from_pretrained(
            directory,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, KeyError, AttributeError, RuntimeError) as error:
        raise _unusable(what, directory, first_line(error)) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for each in sorted(differences.get(kind, ())):
            what = f"the files do not have exactly the tensors of a {name}, which config.json names"
            raise _unusable(what, directory, f"{kind.replace('_', ' ')}: {each}")
    return model.eval(), output


def _unusable(what: str, directory: Path, value: str) -> CheckpointUnusable:
    return CheckpointUnusable(what, where=str(directory), value=value, hint=_HINT)
