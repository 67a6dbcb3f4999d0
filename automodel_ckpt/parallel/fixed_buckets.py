"""Data parallelism by replicas that sum gradients in the same buckets in every step.

DistributedDataParallel sums gradients in buckets. In its second step, it rebuilds them in the order in which the
gradients of the first step became ready. With three or more ranks, the place of an element in its bucket decides in
which order the ranks' values are added, and so its rounding. The first step of a resumed run is a later step of the run
that was not interrupted. Without fixed buckets, the resumed run would round differently.
"""

from __future__ import annotations

import copy
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class FixedBucketsDDP(DistributedDataParallel):
    """DistributedDataParallel with buckets in the reverse order of the model's parameters, in the first step too.

    It takes the arguments of DistributedDataParallel. The last layers have the first buckets, so that their sums are
    computed during the rest of the backward pass.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # torch has no option for this. DistributedDataParallel.join makes the same two calls where a rank has no step
        # to take the order from. The second one communicates: all ranks use the order of rank 0.
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, expect_sparse_gradient = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], expect_sparse_gradient[::-1]

    def _post_forward(self, output: Any) -> Any:
        """Finish a forward pass as DistributedDataParallel does, which looks for unused parameters from the tensors in
        the output. torch does not find those in an object with attributes."""
        if self.find_unused_parameters and _has_hidden_tensors(output):
            found = copy.copy(output)
            vars(found).update(self._post_forward(dict(vars(output))))
            return found
        return super()._post_forward(output)  # type: ignore[no-untyped-call]


def _has_hidden_tensors(output: Any) -> bool:
    if isinstance(output, (Tensor, list, tuple, dict)) or is_dataclass(output):
        return False
    return any(isinstance(each, Tensor) for each in getattr(output, "__dict__", {}).values())
