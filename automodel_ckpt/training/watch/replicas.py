"""Detection of silent data corruption: replicas of the model must have the same bits on all their ranks.

Ranks of DDP, and the replicas of HSDP, compute the same update from the same summed gradients. A difference is an error
of the hardware or of a kernel, which would otherwise spread with the next gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint.parts.failures import gather_or_raise
from automodel_ckpt.checkpoint.state.module_tensors import unwrap
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import AutomodelError, RecipeError
from automodel_ckpt.models.inspect.interface import in_all_layers, listed
from automodel_ckpt.parallel.gradients import complete_gradient, local_shard
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.ranks import agree
from automodel_ckpt.parallel.tensor_parallel import OTHER_PLAN
from automodel_ckpt.training.model.sections import compute_dtype

KEY = "checkpoint.verify_replicas"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """Compares the parameters of *model* between the ranks that hold replicas of them.

    *is_replicated* states whether the strategy replicates the model over all data-parallel ranks (DDP).
    """

    def __init__(self, model: nn.Module, layout: RankLayout, *, is_replicated: bool) -> None:
        self._model = unwrap(model)
        self._group = layout.gloo_group
        self._rank = layout.rank
        if is_replicated:
            self._shard: tuple[int, ...] = (layout.pp_rank, layout.tp_rank)
        else:
            shard_rank = layout.dp_rank % layout.sizes.dp_shard
            self._shard = (layout.pp_rank, shard_rank, layout.cp_rank, layout.tp_rank)

    def check(self, step: int) -> None:
        """Raise :class:`AutomodelError` on all ranks if replicas differ after *step*. Collective.

        The message names the first parameter that differs and the ranks that differ from most others.
        """
        sums: dict[str, int] = {}

        def digest_here() -> tuple[tuple[int, ...], str]:
            named = {name: checksum(each) for name, each in self._model.named_parameters()}
            # One copy to the host for all parameters.
            totals = torch.stack(list(named.values())).tolist()
            sums.update(zip(named, totals, strict=True))
            return self._shard, xxhash.xxh3_64_hexdigest(repr(sums).encode())

        # A short exchange first: in a correct run, it is the only one.
        digests = gather_or_raise(
            self._group, digest_here, f"comparing replicas after step {step}", KEY, AutomodelError
        )
        shards = [shard for shard, _ in digests]
        if len(set(digests)) == len(set(shards)):
            return
        raise _difference(step, shards, agree.gather_objects(self._group, sums))


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the elements of a tensor, or of its local part, read as integers: int64, 0-dim.

    A change of a single bit always changes it. It is computed on the tensor's device without a copy.
    """
    local: Any = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    integers = _INTEGERS.get(local.element_size(), torch.int8)
    total: Tensor = local.contiguous().view(integers).sum(dtype=torch.int64)
    return total


def _difference(
    step: int, shards: Sequence[tuple[int, ...]], sums: Sequence[Mapping[str, int]]
) -> AutomodelError:
    """Return the error for replicas that differ: *shards* and *sums* have an entry for each rank, in order."""
    differing: dict[int, str] = {}
    by_shard: dict[tuple[int, ...], list[int]] = {}
    for rank, shard in enumerate(shards):
        by_shard.setdefault(shard, []).append(rank)
    for ranks in by_shard.values():
        for name in sums[ranks[0]]:
            for rank in outliers({rank: sums[rank][name] for rank in ranks}):
                differing.setdefault(rank, name)
    ranks = sorted(differing)
    return AutomodelError(
        f"replicas of the model differ after step {step}: rank {listed(ranks, 8)} has other values",
        where=f"{KEY}: {differing[ranks[0]]}",
        value="silent data corruption",
        hint="check the memory and the GPU of each of these ranks; the same command continues from the last checkpoint",
    )


def outliers(values: Mapping[int, int]) -> set[int]:
    """Return the ranks that differ from the most frequent value, or all ranks if no value is the most frequent.

    *values* has the value of each rank.
    """
    counts = Counter(values.values()).most_common(2)
    if len(counts) == 1:
        return set()
    (most, num_most), (_, num_next) = counts
    if num_most == num_next:
        return set(values)
    return {rank for rank, value in values.items() if value != most}


_MAX_STEPS = 10
_NUM_SUMS = 8
_NEGLIGIBLE = 1e-6
"""A gradient with a norm below this part of the largest one may be rounding only, which differs between ranks."""


class ReplicatedGradients:
    """Compares the gradients of the trained parameters that are replicated over the ranks of a tensor parallel group.

    Each parameter is compared in the first step in which its gradient is not zero (lora_A has none before lora_B is
    updated), but only in the first steps of a process: the comparison waits for the device.
    """

    def __init__(self, model: nn.Module, config: RecipeConfig) -> None:
        self._pending: dict[str, nn.Parameter] = {}
        for name, parameter in unwrap(model).named_parameters():
            if parameter.requires_grad and _is_replicated(parameter):
                self._pending[name] = parameter
        self._tolerance = _tolerance(model, config)
        self._num_steps_left = _MAX_STEPS

    def check(self, group: dist.ProcessGroup | None) -> None:
        """Compare the gradients of this step, before they are clipped. Collective over *group*, the ranks of the run.

        Raises :class:`RecipeError` on all ranks if some differ.
        """
        if self._num_steps_left == 0:
            return
        self._num_steps_left -= 1
        # Pipeline stages have other parameters: one may be done before another.
        if all(agree.gather_or_raise(group, self._is_done_after_comparison)):
            self._num_steps_left = 0

    def _is_done_after_comparison(self) -> bool:
        """Compare the gradients within this rank's group. Returns whether each parameter has been compared."""
        if not self._pending:
            return True
        found = self._compare()
        for name in found:
            del self._pending[name]
        differing = {name: part for name, part in found.items() if part > self._tolerance}
        if differing:
            raise _error(differing)
        return not self._pending

    def _compare(self) -> dict[str, float]:
        """The largest difference of each gradient between ranks as a part of its norm, without negligible gradients."""
        rows = []
        for parameter in self._pending.values():
            complete_gradient(parameter)
            rows.append(_summary(parameter))
        first = next(iter(self._pending.values()))
        assert isinstance(first, DTensor)
        # A maximum may lose NaN. Without values for infinities, nan_to_num would make them finite.
        here = torch.stack(rows).nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        # With CPU offload, gradients are on the CPU, but the group is the GPUs'.
        here = here.to(first.device_mesh.device_type)
        # One collective for the largest and the smallest values.
        extremes = torch.cat([here, -here])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=first.device_mesh.get_group("tp"))
        # A step with gradients that are not finite changes no weight.
        if not torch.isfinite(extremes).all():
            return {}
        largest, negated_smallest = extremes.cpu().chunk(2)
        differences = (largest + negated_smallest).amax(dim=1).tolist()
        norms = largest[:, 0].tolist()
        negligible = _NEGLIGIBLE * max(norms)
        found = {}
        for name, difference, norm in zip(self._pending, differences, norms, strict=True):
            if norm > negligible:
                found[name] = difference / norm
        return found


def _tolerance(model: nn.Module, config: RecipeConfig) -> float:
    """The difference between gradients, as a part of their norm, that rounding in the run's data types can explain.

    The values are far above the differences between kernels that add in varying order, and far below the differences
    between ranks that see other heads or columns.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    compute_type = compute_dtype(config.distributed)
    if compute_type is not None:
        dtypes.add(compute_type)
    is_16_bit = any(dtype.itemsize < 4 for dtype in dtypes)
    return 0.1 if is_16_bit else 1e-3


def _is_replicated(parameter: nn.Parameter) -> bool:
    """Whether all ranks of a tensor parallel group have a copy of this parameter, or of the same shard of it."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    if "tp" not in names:
        return False
    return parameter.placements[names.index("tp")].is_replicate()


def _summary(parameter: nn.Parameter) -> Tensor:
    """[norm, sums of every eighth element] of this rank's part of the gradient: float64 of length 9, on its device.

    If two gradients differ by a random vector, each sum differs by a third of the vector's norm on average. Unlike
    projections on random vectors, sums need no memory.
    """
    gradient = parameter.grad
    local = torch.zeros(0, device=parameter.device) if gradient is None else local_shard(gradient)
    flat = local.detach().reshape(-1)
    num_even = flat.numel() // _NUM_SUMS * _NUM_SUMS
    sums = flat[:num_even].view(-1, _NUM_SUMS).sum(dim=0, dtype=torch.float32).double()
    sums[: len(flat) - num_even] += flat[num_even:].double()
    norm = torch.linalg.vector_norm(flat, dtype=torch.float32).double()
    return torch.cat([norm[None], sums])


def _error(differing: Mapping[str, float]) -> RecipeError:
    """The error for parameters with gradients that differ by these parts of their norms."""
    names: dict[str, None] = {}
    # The backward pass starts at the loss: the last modules are the closest to the cause.
    for name in reversed([*differing]):
        names[in_all_layers(name)] = None
    return RecipeError(
        "the tensor parallel plan is incomplete: the copies of replicated parameters get different gradients on the "
        "ranks of a group, and would diverge (modules that see only a rank's heads or columns need the style "
        "replicated_with_grad_allreduce)",
        where="distributed.tp_size",
        value=listed([*names]),
        hint=OTHER_PLAN,
    )
