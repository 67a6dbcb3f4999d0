"""Small state for checkpoint tests: a recipe-like object, ranks, and how to save and load it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, Resumed, SaveReport, discover


class Counter:
    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Odd(torch.nn.Module):
    """Every kind of tensor that checkpoints get wrong: tied, 0-dim, empty, integer, bool, uneven, bf16, frozen."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.embed = torch.nn.Parameter(random(7, 4))
        self.head = self.embed
        self.scale = torch.nn.Parameter(random(1).reshape(()))
        self.one_row = torch.nn.Parameter(random(1, 3))
        self.frozen = torch.nn.Parameter(random(5, 3), requires_grad=False)
        self.brief = torch.nn.Parameter(random(3, 2).to(torch.bfloat16))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("steps", torch.tensor([2**40 + seed, 5]))
        self.register_buffer("mask", torch.tensor([True, False, seed % 2 == 0]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ self.embed.t() @ self.head * self.scale
        return (
            hidden.sum() + (self.one_row * self.one_row).sum() + self.brief.float().square().sum()
        )


def train(recipe: SimpleNamespace, steps: int = 2) -> None:
    for _ in range(steps):
        recipe.optimizer.zero_grad()
        recipe.model(torch.ones(2, 4)).backward()
        recipe.optimizer.step()
        recipe.lr_scheduler.step()


def recipe(seed: int = 0, **more: Any) -> SimpleNamespace:
    """A recipe-like object with a model, an optimizer, a schedule with integer keys, and *more*."""
    model = Odd(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3, 3])
    return SimpleNamespace(model=model, optimizer=optimizer, lr_scheduler=schedule, **more)


def checkpointer(root: Path, **options: Any) -> Checkpointer:
    """A checkpointer of all ranks, by the names of its options, ``assets`` and ``timeout_seconds`` among them."""
    arguments = {
        name: options.pop(name) for name in ("assets", "timeout_seconds") if name in options
    }
    return Checkpointer(root, options=CheckpointOptions(**options), **arguments)


def kept_plan(checkpointer: Checkpointer) -> Any:
    """The plan that the next asynchronous save can reuse, if there is one."""
    return None if checkpointer._async is None else checkpointer._async._kept


def save(root: Path, made: SimpleNamespace, step: int = 20, **options: Any) -> SaveReport:
    names = ("epoch", "losses", "validated", "last")
    call: dict[str, Any] = {"epoch": 0, "losses": {"step": step, "val_loss": None}}
    call |= {name: options.pop(name) for name in names if name in options}
    saver = checkpointer(root, **options)
    try:
        return saver.save(
            discover(made),
            step=step,
            config_yaml="seed: 1\n",
            progress={"consumed_samples": step},
            **call,
        )
    finally:
        saver.close()


def load(root: Path, made: SimpleNamespace, **options: Any) -> Resumed | None:
    loader = checkpointer(root, **options)
    try:
        return loader.load(discover(made))
    finally:
        loader.close()


def tensors_of(made: SimpleNamespace) -> dict[str, torch.Tensor]:
    found = {
        f"model.{name}": value.detach().clone() for name, value in made.model.state_dict().items()
    }
    for index, entry in enumerate(made.optimizer.state.values()):
        found |= {
            f"optimizer.{index}.{name}": value.detach().clone() for name, value in entry.items()
        }
    return found


def assert_equal_state(one: SimpleNamespace, other: SimpleNamespace) -> None:
    a, b = tensors_of(one), tensors_of(other)
    assert a.keys() == b.keys()
    different = [
        name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])
    ]
    assert not different, different
    assert one.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]
    assert one.lr_scheduler.state_dict() == other.lr_scheduler.state_dict()
