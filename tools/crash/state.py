"""The state that the campaigns save: small, sharded over the ranks, and a pure function of one number."""

import functools
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

SHAPES = {"embed": (7, 4), "hidden": (5, 6), "one_row": (1, 3), "scale": (6,)}
CUT = {"hidden": 1}
"""The dimension that the ranks share out, where it is not the first."""


class Kept:
    def __init__(self, value: Any, scope: str) -> None:
        self.value = value
        self.checkpoint_scope = scope

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def fixed(seed: int, rows: int) -> torch.Tensor:
    """The value of a parameter that does not train. Its last row, which is on the last rank, rarely changes."""
    value = torch.arange(20.0 * rows).reshape(5 * rows, 4)
    value[-1] += seed // 40
    return value


class Net(torch.nn.Module):
    """Uneven, one-row, bfloat16, frozen and tied parameters, sharded; 0-dim, integer, bool and empty buffers."""

    def __init__(
        self, generator: torch.Generator, mesh: DeviceMesh | None, rows: int, seed: int
    ) -> None:
        super().__init__()
        for name, (first, *rest) in SHAPES.items():
            value = torch.randn((first * rows, *rest), generator=generator)
            value = value.to(torch.bfloat16) if name == "hidden" else value
            self.register_parameter(
                name, torch.nn.Parameter(sharded(value, mesh, CUT.get(name, 0)))
            )
        self.head = self.embed
        self.fixed = torch.nn.Parameter(sharded(fixed(seed, rows), mesh, 0), requires_grad=False)
        self.register_buffer("mean", torch.randn((), generator=generator))
        self.register_buffer("count", torch.randint(2**40, (3,), generator=generator))
        self.register_buffer("mask", torch.randn(4, generator=generator) > 0)
        self.register_buffer("empty", torch.empty(0, 3))


def sharded(value: torch.Tensor, mesh: DeviceMesh | None, dim: int) -> torch.Tensor:
    if mesh is None:
        return value
    return distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)


mesh_of = functools.cache(partial(init_device_mesh, "cpu"))


def build(seed: int, rows: int = 1) -> SimpleNamespace:
    """A recipe-like object with values that all follow from *seed*; *rows* times as large."""
    generator = torch.Generator().manual_seed(seed)
    mesh = mesh_of((dist.get_world_size(),)) if dist.is_initialized() else None
    model = Net(generator, mesh, rows, seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3, 3])
    schedule.last_epoch = seed
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        shape, dtype, dim = parameter.shape, parameter.dtype, CUT.get(name, 0)
        moments = {
            entry: sharded(torch.randn(shape, generator=generator).to(dtype), mesh, dim)
            for entry in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[parameter] = {"step": torch.tensor(float(seed)), **moments}
    rank = dist.get_rank() if mesh else 0
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        rng=Kept(
            torch.randint(256, (64,), generator=generator, dtype=torch.uint8) + rank, "rank_rng"
        ),
        dataloader=Kept({"epoch": 0, "consumed_samples": seed}, "dp_rank"),
        scheduler=Kept({"step": seed}, "replicated"),
    )


def tensors_of(made: SimpleNamespace) -> dict[str, torch.Tensor]:
    """All tensors, by name, as baselines save them: they know nothing of other state."""
    found = dict(made.model.state_dict())
    found.pop("head")
    for name, parameter in made.model.named_parameters():
        if not parameter.requires_grad:
            continue
        found |= {f"optimizer.{name}.{k}": v for k, v in made.optimizer.state[parameter].items()}
    return found


def digest(made: SimpleNamespace, *, tensors_only: bool = False) -> str:
    """One number for all that this rank holds."""
    hashed = xxhash.xxh3_128()
    for name, value in sorted(tensors_of(made).items()):
        local = value.to_local() if isinstance(value, DTensor) else value
        hashed.update(f"{name} {local.dtype} {tuple(local.shape)}".encode())
        hashed.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if not tensors_only:
        others = (
            made.rng.value.tolist(),
            made.dataloader.value,
            made.scheduler.value,
            made.lr_scheduler.last_epoch,
        )
        hashed.update(repr(others).encode())
    return hashed.hexdigest()


@functools.cache
def expected(seed: int, rows: int = 1, *, tensors_only: bool = False) -> str:
    """The digest of the state that *seed* stands for, on this rank."""
    return digest(build(seed, rows), tensors_only=tensors_only)


def forget() -> None:
    """Forget what belongs to a process group that ended."""
    mesh_of.cache_clear()
    expected.cache_clear()
