"""The section ``distributed``: how the work is distributed across ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypedDict

from automodel_ckpt.config.tree.rules import (
    AT_LEAST_1,
    WAIT,
    Condition,
    Relation,
    Target,
    setting,
)


class MeshSizes(TypedDict):
    """The sizes of the device mesh that a recipe gives. A *dp_size* of None takes all remaining ranks."""

    dp_size: int | None
    dp_replicate_size: int
    tp_size: int
    pp_size: int
    cp_size: int
    ep_size: int


@dataclass
class DistributedConfig:
    """Parallelism: how the work is distributed across ranks."""

    strategy: Literal["auto", "fsdp2", "ddp", "single"] = "auto"
    """Data parallelism: fsdp2 shards the model, ddp replicates it; auto: fsdp2 on several ranks (ddp for a quantized
    base); one rank: single, on a GPU with mixed_precision fsdp2."""
    dp_size: int | None = setting(None, AT_LEAST_1)
    """Data-parallel size; null: the number of ranks divided by the other sizes."""
    dp_replicate_size: int = setting(1, AT_LEAST_1)
    """fsdp2: replicas of the model, each sharded across dp_size / dp_replicate_size ranks (HSDP above 1)."""
    tp_size: int = setting(1, AT_LEAST_1)
    """Tensor-parallel size. Layers are sharded according to the model's tensor-parallel plan."""
    # supplied: arguments that the recipe's class adds, so that they are not reported as missing.
    tp_plan: Target | None = field(default=None, metadata={"supplied": ("model",)})
    """Builder of a custom tensor-parallel plan {module name: style}, called with the model; * matches any layer."""
    sequence_parallel: bool = False
    """With tp_size: shard activations between layers along the sequence (Llama and Qwen architectures)."""
    pp_size: int = setting(1, AT_LEAST_1)
    """Pipeline-parallel size: the number of ranks that compute different layers of the model."""
    pp_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """With pp_size: 1f1b alternates forward and backward passes; gpipe runs all forward passes first."""
    cp_size: int = setting(1, AT_LEAST_1)
    """Context-parallel size: each row is sharded along the sequence, and attention by heads."""
    ep_size: int = setting(1, AT_LEAST_1)
    """Expert-parallel size: the data-parallel ranks that store different experts and exchange tokens (MoE, fsdp2)."""
    backend: str | None = None
    """torch.distributed backend; null: nccl on GPUs, otherwise gloo."""
    timeout_minutes: float = setting(30.0, WAIT)
    """Timeout of collectives, in minutes (0.1 to 1000000)."""
    reshard_after_forward: bool = True
    """fsdp2: free gathered parameters after the forward pass (less memory, more communication)."""
    cpu_offload: bool = False
    """fsdp2 on GPUs: keep parameters, gradients and optimizer state in CPU memory when not in use."""
    defer_gradient_sync: bool = False
    """fsdp2: reduce gradients over the ranks once per step, after the last micro-batch. Less communication, but each
    rank holds the unsharded gradient, and the gathered parameters, between micro-batches."""
    mixed_precision: Literal["auto", "bfloat16", "float16", "none"] | None = "auto"
    """Data type of forward and backward; weights, gradient reduction and optimizer state keep model.dtype. auto:
    bfloat16 on a GPU; none or null: model.dtype."""

    @property
    def mesh_sizes(self) -> MeshSizes:
        """The sizes of the device mesh, as arguments of functions that compute or build it."""
        return {
            "dp_size": self.dp_size,
            "dp_replicate_size": self.dp_replicate_size,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "cp_size": self.cp_size,
            "ep_size": self.ep_size,
        }

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(
            # Without a loss scaler, updates below 6e-8 of a weight would vanish.
            ("mixed_precision",),
            lambda ranks: ranks.mixed_precision != "float16",
            "float16 needs a loss scaler, which is not supported",
            "set it to bfloat16, or remove it",
        ),
        Relation(
            ("sequence_parallel", "tp_plan", "tp_size"),
            lambda ranks: ranks.tp_size > 1 or not (ranks.sequence_parallel or ranks.tp_plan),
            "sequence_parallel and tp_plan require tensor parallelism, but tp_size is 1",
            "set tp_size above 1, or remove them",
        ),
        Relation(
            ("pp_size", "sequence_parallel"),
            lambda ranks: ranks.pp_size == 1 or not ranks.sequence_parallel,
            "pp_size and sequence_parallel cannot be combined",
            "remove sequence_parallel; tp_size works with pipeline stages without it",
        ),
        Relation(
            ("pp_schedule", "pp_size"),
            lambda ranks: ranks.pp_size > 1 or ranks.pp_schedule == "1f1b",
            "pp_schedule requires pipeline parallelism, but pp_size is 1",
            "set pp_size above 1, or remove pp_schedule",
        ),
        Relation(
            # The gradient norm is then summed in CPU memory, which nccl cannot reduce.
            ("cpu_offload", "backend"),
            lambda ranks: (
                not ranks.cpu_offload or ranks.backend in (None, "gloo") or "cpu:" in ranks.backend
            ),
            "cpu_offload needs a backend that also reduces CPU tensors",
            "remove backend, or set it to cpu:gloo,cuda:nccl",
        ),
        Relation(
            ("ep_size", "tp_size"),
            lambda ranks: ranks.ep_size == 1 or ranks.tp_size == 1,
            "ep_size and tp_size cannot be combined",
            "remove one of them",
        ),
        Relation(
            ("ep_size", "strategy"),
            lambda ranks: ranks.ep_size == 1 or ranks.strategy in ("auto", "fsdp2"),
            "expert parallelism shards the model, which only fsdp2 does",
            "set distributed.strategy to fsdp2 or auto, or remove ep_size",
        ),
        Relation(
            ("cp_size", "sequence_parallel"),
            lambda ranks: ranks.cp_size == 1 or not ranks.sequence_parallel,
            "cp_size and sequence_parallel cannot be combined: both shard the sequence",
            "remove sequence_parallel",
        ),
    )
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("reshard_after_forward",),
            ("strategy",),
            lambda ranks: ranks.strategy in ("auto", "fsdp2"),
            "only fsdp2 shards parameters",
            "set distributed.strategy to fsdp2 or auto, or remove the key",
        ),
        Condition(
            ("defer_gradient_sync",),
            ("strategy",),
            lambda ranks: ranks.strategy in ("auto", "fsdp2"),
            "only fsdp2 can reduce gradients after each micro-batch; ddp reduces them once per step",
            "set distributed.strategy to fsdp2 or auto, or remove the key",
        ),
    )
