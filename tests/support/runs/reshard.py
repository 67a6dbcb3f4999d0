"""A model with all that resharding gets wrong, on any layout; the value of each tensor follows from its name."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, discover
from automodel_ckpt.models.meta_init import put
from automodel_ckpt.parallel.mesh_sizes import RankLayout
from automodel_ckpt.parallel.parallelize import Parallelism, parallelize
from automodel_ckpt.training.model.pipeline import split_stages, train_stages
from tests.support.runs.parallel import layout_here, model_of

LR = 0.123


@dataclass(frozen=True)
class Way:
    name: str
    num_ranks: int
    how: Parallelism
    sizes: tuple[tuple[str, int], ...] = ()


WAYS = (
    Way("single", 1, Parallelism()),
    Way("fsdp2 of one", 1, Parallelism(strategy="fsdp2")),
    Way("ddp 2", 2, Parallelism(strategy="ddp")),
    Way("fsdp2 2", 2, Parallelism()),
    Way("hsdp 2x1", 2, Parallelism(), (("dp_replicate_size", 2),)),
    Way("tp 2", 2, Parallelism(), (("tp_size", 2),)),
    Way("fsdp2 1 x tp 2", 2, Parallelism(strategy="fsdp2"), (("tp_size", 2),)),
    Way("pp 2", 2, Parallelism(), (("pp_size", 2),)),
    Way("ddp 4", 4, Parallelism(strategy="ddp")),
    Way("fsdp2 4", 4, Parallelism()),
    Way("hsdp 2x2", 4, Parallelism(), (("dp_replicate_size", 2),)),
    Way("cp 2", 2, Parallelism(), (("cp_size", 2),)),
    Way("cp 2 x tp 2", 4, Parallelism(), (("cp_size", 2), ("tp_size", 2))),
    Way("tp 4", 4, Parallelism(), (("tp_size", 4),)),
    Way("fsdp2 2 x tp 2", 4, Parallelism(), (("tp_size", 2),)),
    Way("pp 4", 4, Parallelism(), (("pp_size", 4),)),
    Way("fsdp2 2 x pp 2", 4, Parallelism(), (("pp_size", 2),)),
    Way("tp 2 x pp 2", 4, Parallelism(), (("tp_size", 2), ("pp_size", 2))),
    Way("hsdp 2x1 x pp 2", 4, Parallelism(), (("dp_replicate_size", 2), ("pp_size", 2))),
    Way("hsdp 2x1 x tp 2", 4, Parallelism(), (("tp_size", 2), ("dp_replicate_size", 2))),
)
SAMPLE = ("single", "tp 2", "fsdp2 2 x pp 2")
"""What `make test` does of it; `make reshard` does all, in all formats."""


class Odd(nn.Module):
    """Uneven, frozen, in another type, of one element; and buffers: 0-dim, empty, whole numbers, truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.uneven = nn.Parameter(torch.empty(5, 3))
        self.frozen = nn.Parameter(torch.empty(7, 2), requires_grad=False)
        self.brief = nn.Parameter(torch.empty(3, 2, dtype=torch.bfloat16))
        self.one = nn.Parameter(torch.empty(1))
        self.register_buffer("scalar", torch.tensor(0.0))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))


class Shared:
    """A recipe-like object on the present ranks: a model with tied weights and an optimizer."""

    def __init__(self, way: Way) -> None:
        self.way, self.layout = way, layout_here(**dict(way.sizes))
        built = model_of(tie_word_embeddings=True, num_hidden_layers=4)
        built.model.layers[0].odd = Odd()  # type: ignore[union-attr]
        built.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)  # type: ignore[union-attr]
        self.model = self._shared(built)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.layout.sizes.pp > 1:
            train_stages(self.optimizer, self.model, self.layout)

    def _shared(self, built: nn.Module) -> nn.Module:
        if self.layout.sizes.pp == 1:
            return parallelize(built, self.layout, self.way.how)
        made = split_stages(built, self.layout, None, None)
        return parallelize(
            built, self.layout, replace(self.way.how, tp_plan=made.tp_plan), mesh=made.mesh
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that a checkpoint must bring back, under a name that all layouts share; the live ones."""
        names = {}
        for name, parameter in self.model.named_parameters():
            names[id(parameter)] = name.removeprefix("module.")
            yield f"model.{names[id(parameter)]}", parameter
        for name, buffer in self.model.named_buffers():
            if ".odd." in f".{name}":
                yield f"model.{name.removeprefix('module.')}", buffer
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                yield f"optimizer.{names[id(parameter)]}.{key}", value

    @torch.no_grad()
    def fill(self) -> None:
        for name, tensor in self.tensors():
            put(tensor, value_of(name, tensor))

    @torch.no_grad()
    def clear(self) -> None:
        for _, tensor in self.tensors():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        self.optimizer.param_groups[0]["lr"] = 0.0

    def wrong(self) -> list[str]:
        """The names of tensors that differ, in any bit, from what they stand for on this rank."""
        found = [] if self.optimizer.param_groups[0]["lr"] == LR else ["learning rate"]
        for name, tensor in self.tensors():
            expected = tensor.detach().clone()
            put(expected, value_of(name, tensor))
            if not torch.equal(_local(tensor), _local(expected)):
                found.append(name)
        return found

    @property
    def state(self) -> dict[str, Any]:
        return discover(SimpleNamespace(model=self.model, optimizer=self.optimizer))


def value_of(name: str, like: torch.Tensor) -> torch.Tensor:
    """The whole tensor that a name stands for."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    drawn = torch.randint(-999, 999, like.shape, generator=torch.Generator().manual_seed(seed))
    return (drawn > 0) if like.dtype == torch.bool else drawn.to(like.dtype)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def checkpointer(root: Path, layout: RankLayout, **options: Any) -> Checkpointer:
    return Checkpointer(root, layout, dist.group.WORLD, CheckpointOptions(**options))


def save_all(directory: Path, ways: tuple[Way, ...], formats: dict[str, dict[str, Any]]) -> None:
    for way in ways:
        shared = Shared(way)
        shared.fill()
        for name, options in formats.items():
            saver = checkpointer(place(directory, way, name), shared.layout, **options)
            saver.save(
                shared.state, step=1, epoch=0, config_yaml="", losses={"step": 1}, progress={}
            )
            saver.close()


def load_all(
    directory: Path, ways: tuple[Way, ...], saved: tuple[Way, ...], formats: dict[str, Any]
) -> list[str]:
    """Each way loads what all have saved; what came back wrong on this rank."""
    found = []
    for way in ways:
        shared = Shared(way)
        for source in saved:
            for name in formats:
                shared.clear()
                loader = checkpointer(place(directory, source, name), shared.layout)
                loader.load(shared.state)
                loader.close()
                found += [
                    f"{source.name} ({name}) -> {way.name}: {wrong}" for wrong in shared.wrong()
                ]
    return found


def place(directory: Path, way: Way, name: str) -> Path:
    return directory / way.name.replace(" ", "_") / name
