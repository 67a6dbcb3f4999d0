"""Whether a model in 16 bits can compute with parameters in float32, found with tensors without values."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from automodel_ckpt.models.inspect.quiet_loggers import quiet

log = logging.getLogger("automodel_ckpt")

_NUM_TOKENS = 8
_SAME_TYPES = ("mm", "addmm", "bmm", "baddbmm", "convolution")
_NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm")


def computes_as_built(
    model: PreTrainedModel, dtype: torch.dtype, float32_buffers: Collection[str] = ()
) -> bool:
    """Whether a model like *model* that is built in *dtype* computes with the types that its tensors then have.

    Some classes create parameters in float32, and convert them where they use them, or their inputs to this type. In
    others, an operation gets tensors of two types. The buffers *float32_buffers* are in float32 in any case. False also
    for a model that cannot be tried without values: its inputs are no token ids, or its code reads values.
    """
    config = copy.deepcopy(model.config)
    make: Any = type(model)._from_config
    inputs: dict[str, torch.Tensor] = {}
    # torch logs an operation that fails as an error.
    silent = quiet("torch._subclasses.fake_tensor", level=logging.CRITICAL)
    with silent, torch.random.fork_rng(devices=[]), FakeTensorMode(), torch.no_grad():
        try:
            built = make(config, dtype=dtype).eval()
            for name in float32_buffers:
                prefix, _, key = name.rpartition(".")
                buffers = built.get_submodule(prefix)._buffers
                buffers[key] = buffers[key].float()
            inputs[built.main_input_name] = torch.zeros((1, _NUM_TOKENS), dtype=torch.long)
            if config.is_encoder_decoder:
                inputs["decoder_input_ids"] = inputs[built.main_input_name]
            checks: Any = _ChecksOfKernels
            with checks():
                built(**inputs)
        except Exception:
            # Whatever the code of a model raises.
            log.debug("%s cannot be tried without values", type(model).__name__, exc_info=True)
            return False
    return True


class _ChecksOfKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises TypeError for types that torch rejects only where there are values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _NORMS or name in _SAME_TYPES:
            inputs, *weights = (each for each in args if isinstance(each, torch.Tensor))
            for weight in weights:
                # A norm may have weights in float32 for inputs in 16 bits.
                is_mixed = name in _NORMS and weight.dtype == torch.float32
                if weight.dtype != inputs.dtype and not is_mixed:
                    raise TypeError(f"{name} of {inputs.dtype} with {weight.dtype}")
        return func(*args, **(kwargs or {}))
