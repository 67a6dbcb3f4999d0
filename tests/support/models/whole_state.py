"""The tensors of a model that ranks share, in full."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def whole_state(model: Any, *, with_buffers: bool = True) -> dict[str, torch.Tensor]:
    """Copies of all tensors by the names of the model before it was shared. A collective."""
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    named = dict(inside.state_dict() if with_buffers else inside.named_parameters())
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in named.items()
    }
