"""Expert parallelism: each rank stores some experts of a mixture, and tokens are sent to the ranks of their experts.

The data parallel ranks form groups of ``ep_size`` neighbors. The ranks of a group store different experts of each
layer, and the groups shard the same experts among each other (fsdp2). A rank sends each of its tokens to the ranks of
the experts that the router chose, in one all-to-all, and gets the experts' outputs back in a second one.

Without expert parallelism, fsdp2 gathers all experts of a layer on each rank. With it, a rank gathers only
1 / ``ep_size`` of them, and sends tokens instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from automodel_ckpt.errors import RecipeError
from automodel_ckpt.parallel.mesh import exchange
from automodel_ckpt.parallel.mesh_sizes import RankLayout

_WHERE = "distributed.ep_size"


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of *model* that store the experts of a layer, by name.

    Such a module is called with tokens [N, H], the chosen experts [N, K] and their weights [N, K]. All of its
    parameters have one row per expert, as in transformers since version 5.
    """
    return {name: module for name, module in model.named_modules() if _stores_experts(module)}


def check_experts(model: nn.Module, layout: RankLayout) -> None:
    """Validate that the experts of *model* can be divided among the ranks, before it has values.

    Raises :class:`RecipeError` for a model without experts, for experts with another interface, and for a number of
    experts that the ranks cannot divide evenly.
    """
    sizes = layout.sizes
    experts = experts_of(model)
    if not experts:
        raise RecipeError(
            "this model has no experts that expert parallelism could divide",
            where=_WHERE,
            value=f"{sizes.ep}; {type(model).__name__}",
            hint="remove the key",
        )
    for name, module in experts.items():
        num_experts = _num_experts(module)
        if num_experts % sizes.expert_parts == 0:
            continue
        raise RecipeError(
            "the experts of a layer cannot be divided evenly among the ranks",
            where=_WHERE,
            value=f"{sizes.ep}; {name} has {num_experts} experts, and {sizes.expert_parts} ranks shard the model",
            hint=f"start a number of ranks, or set dp_replicate_size, so that the ranks that shard the model divide "
            f"{num_experts}; or remove ep_size",
        )


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Leave this rank's experts in each layer of *model*, in place, and route tokens between the ranks.

    *mesh* is the 1-D mesh of the ranks with different experts. Returns the changed modules. Their parameters are
    DTensors of all experts, sharded along their first dimension. Their gradients are divided by the size of the mesh:
    an expert gets the tokens of all its ranks, while fsdp2 averages gradients over ranks with different tokens.
    """
    experts = list(experts_of(model).values())
    for module in experts:
        exchange = _TokenExchange(module, mesh.get_group(), _num_experts(module))
        parameters = dict(module.named_parameters(recurse=False))
        for name, parameter in parameters.items():
            # Reads no other rank: all have the same values. A copy, or the shard would keep the memory of all experts.
            rows = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            sharded = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        any_module: Any = module
        # transformers' implementations read the number of experts in the module's parameters here.
        any_module.num_experts = _num_experts(module) // mesh.size()
        any_module.forward = exchange.forward
    return experts


def _stores_experts(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    num_experts = _num_experts(module)
    if not any(parameter.dim() == 3 for parameter in parameters):
        return False
    if any(parameter.shape[0] != num_experts for parameter in parameters):
        return False
    return len(inspect.signature(module.forward).parameters) == 3


def _num_experts(module: nn.Module) -> int:
    """The number of experts in the parameters of a module; 0 for other modules."""
    number = getattr(module, "num_experts", 0)
    return number if isinstance(number, int) else 0


class _TokenExchange:
    """The forward pass of a module of experts, of which this rank stores only some."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, num_experts: int) -> None:
        """*module* still has the forward pass of its class.

        *num_experts* counts the experts of all ranks of *group*.
        """
        self._module = module
        self._compute = module.forward
        self._group = group
        self._num_ranks = group.size()
        self._num_experts = num_experts

    # The sizes of the messages are known only after the router has run, so a compiler has nothing to gain.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted outputs [N, H] of the chosen experts of all tokens. Collective in the group.

        Args:
            hidden_states: This rank's tokens [N, H].
            top_k_index: The experts [N, K] of each token, numbered over all ranks.
            top_k_weights: The weights [N, K] of their outputs.
        """
        top_k = top_k_index.shape[-1]
        chosen = top_k_index.reshape(-1)
        # By expert, and so by rank: ranks store consecutive experts.
        order = torch.argsort(chosen, stable=True)
        tokens = hidden_states[order // top_k]
        num_sent, num_received = self._counts(chosen)
        # One copy to the host: each waits for the device.
        splits = torch.stack([num_sent.sum(1), num_received.sum(1)]).tolist()
        sent_splits, received_splits = splits
        received = exchange(tokens, self._group, sent_splits, received_splits)
        outputs = self._outputs_of_experts(received, num_received)
        returned = exchange(outputs, self._group, received_splits, sent_splits)
        by_token = returned[torch.argsort(order)].view(-1, top_k, tokens.shape[-1])
        weighted: Tensor = by_token * top_k_weights.reshape(-1, top_k, 1)
        return weighted.sum(1).to(hidden_states.dtype)

    def _counts(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The number of tokens that this rank sends and receives, each [ranks, experts of a rank].

        *chosen* are the experts of this rank's tokens, numbered over all ranks.
        """
        num_sent = torch.bincount(chosen, minlength=self._num_experts)
        if num_sent.numel() > self._num_experts:
            raise RecipeError(
                "the router chose an expert that no rank stores",
                where=_WHERE,
                value=f"expert {num_sent.numel() - 1} of {self._num_experts}",
                hint="remove the key",
            )
        num_sent = num_sent.view(self._num_ranks, -1)
        num_received = torch.empty_like(num_sent)
        dist.all_to_all_single(num_received, num_sent, group=self._group)
        return num_sent, num_received

    def _outputs_of_experts(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Compute this rank's experts on *tokens* [M, H]; *counts* [ranks, experts] states their order."""
        num_ranks, num_experts = counts.shape
        experts = torch.arange(num_experts, device=tokens.device).repeat(num_ranks)
        index = experts.repeat_interleave(counts.flatten())
        num_tokens = len(tokens)
        if num_tokens == 0:
            # The experts' parameters must get gradients on all ranks, or fsdp2 would wait for this one.
            tokens = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
            index = index.new_zeros(1)
        weights = torch.ones_like(index, dtype=tokens.dtype)
        with _local_parameters(self._module, 1 / self._num_ranks):
            outputs: Tensor = self._compute(tokens, index.unsqueeze(1), weights.unsqueeze(1))
        return outputs[:num_tokens]


@contextmanager
def _local_parameters(module: nn.Module, gradient_scale: float) -> Iterator[None]:
    """Make *module* compute with this rank's rows as plain tensors.

    The gradients of its parameters are the rows' gradients times *gradient_scale*.
    """
    parameters = dict(module.named_parameters(recurse=False))
    # Instance attributes come before the parameters of a module, which stay as they are.
    attributes = module.__dict__
    for name, parameter in parameters.items():
        rows = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        # A view: a hook of the parameter itself would stay.
        rows = rows.view_as(rows)
        if rows.requires_grad:
            rows.register_hook(lambda gradient: gradient * gradient_scale)  # type: ignore[no-untyped-call]
        attributes[name] = rows
    try:
        yield
    finally:
        for name in parameters:
            del attributes[name]
