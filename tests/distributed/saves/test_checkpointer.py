"""Saving and loading on real ranks."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from automodel_ckpt.checkpoint import Checkpointer, Manifest, discover
from automodel_ckpt.errors import CheckpointUnusable, RecipeError
from tests.support import ranks
from tests.support.models import tiny


class PerRank(tiny.Counter):
    def __init__(self, scope: str, value: Any = None) -> None:
        super().__init__(value)
        self.checkpoint_scope = scope


class Model(torch.nn.Module):
    """Uneven, tied and 0-dim tensors that FSDP2 shards; 5 rows do not divide by 2 or 4."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(5, 8)
        self.first = torch.nn.Linear(8, 3)
        self.second = torch.nn.Linear(3, 8, bias=False)
        self.head = torch.nn.Linear(8, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.tanh(self.first(self.embed(ids))))).square().mean()


def parallelize(model: Model, strategy: str) -> torch.nn.Module:
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.first, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif strategy == "ddp":
        return DistributedDataParallel(model)
    return model


def build(strategy: str, seed: int = 0, **more: Any) -> SimpleNamespace:
    model = parallelize(Model(seed), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3])
    made = SimpleNamespace(model=model, optimizer=optimizer, lr_scheduler=schedule, **more)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(5)).backward()
        optimizer.step()
        schedule.step()
    return made


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_state(made: SimpleNamespace) -> dict[str, torch.Tensor]:
    """All tensors in full, by names that every strategy shares."""
    model = made.model.module if isinstance(made.model, DistributedDataParallel) else made.model
    state = {name: full(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state |= {f"{name}/{k}": full(v) for k, v in made.optimizer.state[parameter].items()}
    return state


def saved_with_rank_state(root: Path) -> None:
    rank = dist.get_rank()
    made = build(
        "fsdp2",
        rng=PerRank("rank_rng", rank),
        dataloader=PerRank("dp_rank", 17),
        alike=tiny.Counter(3),
        odd=tiny.Counter({"rank": rank}),
    )
    tiny.save(root, made)


def loaded_with_rank_state(root: Path, allow: list[str], fits: bool = True) -> dict[str, Any]:
    made = build(
        "fsdp2" if dist.get_world_size() > 1 else "single",
        rng=PerRank("rank_rng"),
        dataloader=PerRank("dp_rank"),
        alike=tiny.Counter(),
        odd=tiny.Counter(),
    )
    made.rng.derive = lambda step: setattr(made.rng, "value", f"derived at {step}")
    made.rng.fits = lambda state: fits
    tiny.load(root, made, allow_missing_state=allow)
    return {name: getattr(made, name).value for name in ("rng", "dataloader", "alike", "odd")}


def test_state_that_differs_between_ranks_is_kept_per_rank_declared_or_not(tmp_path: Path) -> None:
    ranks.run(saved_with_rank_state, 2, tmp_path)
    path = tmp_path / "epoch_0_step_20"
    files = sorted(p.relative_to(path).as_posix() for p in path.rglob("*.pt"))
    assert files == [
        "alike.pt",
        "dataloader/dataloader_dp_rank_0.pt",
        "dataloader/dataloader_dp_rank_1.pt",
        "odd/odd_global_rank_0.pt",
        "odd/odd_global_rank_1.pt",
        "rng/rng_dp_rank_0.pt",
        "rng/rng_dp_rank_1.pt",
    ]
    for rank, values in enumerate(ranks.run(loaded_with_rank_state, 2, tmp_path, [])):
        assert values == {"rng": rank, "dataloader": 17, "alike": 3, "odd": {"rank": rank}}
    for values in ranks.run(loaded_with_rank_state, 2, tmp_path, [], False):
        assert values["rng"] == "derived at 20"


def test_on_other_ranks_state_that_was_alike_comes_back_and_the_rest_is_refused_by_name(
    tmp_path: Path,
) -> None:
    ranks.run(saved_with_rank_state, 2, tmp_path)
    (refused,) = ranks.outcomes(loaded_with_rank_state, 1, tmp_path, [])
    assert isinstance(refused.error, CheckpointUnusable) and "'odd' was saved by 2 ranks" in str(
        refused.error
    )
    (values,) = ranks.run(loaded_with_rank_state, 1, tmp_path, ["odd"])
    assert values == {"rng": "derived at 20", "dataloader": 17, "alike": 3, "odd": 0}


def differences_after_resuming(root: Path) -> list[str]:
    """Trains with batch normalization; what differs on this rank after a resume and two more steps."""

    def made() -> SimpleNamespace:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(1)))
        return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def train(it: SimpleNamespace, *steps: int) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            it.optimizer.zero_grad()
            it.model(torch.randn(6, 4, generator=generator)).square().mean().backward()
            it.optimizer.step()

    one, other = made(), made()
    train(one, 1, 2)
    tiny.save(root, one)
    train(one, 3, 4)
    assert tiny.load(root, other) is not None
    train(other, 3, 4)
    expected = one.model.state_dict()
    return [k for k, v in other.model.state_dict().items() if not torch.equal(v, expected[k])]


def test_a_resume_is_exact_where_ranks_have_different_buffers_which_ddp_broadcasts(
    tmp_path: Path,
) -> None:
    assert ranks.run(differences_after_resuming, 2, tmp_path) == [[], []]


class WithExtraState(Model):
    extra = 0

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


@contextmanager
def differences_logged() -> Iterator[list[str]]:
    """Yield the list of what is logged in the context about values that differ between ranks."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "differs between ranks" in record.getMessage())
    # Another test of this worker may have changed the level.
    logging.getLogger("automodel_ckpt").setLevel(logging.WARNING)
    logging.getLogger("automodel_ckpt").addHandler(handler)
    yield messages
    logging.getLogger("automodel_ckpt").removeHandler(handler)


def warnings_of_a_save(root: Path, strategy: str, *, differing: bool) -> list[str]:
    """What rank 0 logs about values that differ when ranks save the same model, or another one on rank 1."""
    here = dist.get_rank() * differing
    model: Any = WithExtraState(0)
    model.extra, model.count[...] = here, here
    model = parallelize(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + here)
    with differences_logged() as messages:
        tiny.save(root, SimpleNamespace(model=model, optimizer=optimizer))
    return messages


def warnings_of_later_saves(root: Path) -> list[list[str]]:
    """What rank 0 logs at three saves, of which the first has the same values on all ranks."""
    model: Any = parallelize(WithExtraState(0), "fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = discover(SimpleNamespace(model=model, optimizer=optimizer))
    saver = tiny.checkpointer(root)
    found = []
    for step in (1, 2, 3):
        with differences_logged() as messages:
            saver.save(state, step=step, epoch=0, config_yaml="", losses={}, progress={})
        found.append(messages)
        model.count[...] = dist.get_rank()
        optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    saver.close()
    return found


def test_values_that_begin_to_differ_after_the_first_save_are_named_once(tmp_path: Path) -> None:
    of_rank_0, of_rank_1 = ranks.run(warnings_of_later_saves, 2, tmp_path)
    names = [[message.split(" differs")[0] for message in warnings] for warnings in of_rank_0]
    assert names == [[], ["model: count", "optimizer: optimizer.param_groups.0.lr"], []]
    assert of_rank_1 == [[], [], []]


def warnings_of_saves(root: Path) -> list[list[str]]:
    cases = [("fsdp2", True), ("fsdp2", False), ("ddp", True)]
    found = []
    for number, (strategy, differing) in enumerate(cases):
        found.append(warnings_of_a_save(root / str(number), strategy, differing=differing))
    return found


def test_what_only_one_rank_stores_is_named_if_the_ranks_differ(tmp_path: Path) -> None:
    of_rank_0, of_rank_1 = ranks.run(warnings_of_saves, 2, tmp_path)
    names = [[message.split(" differs")[0] for message in warnings] for warnings in of_rank_0]
    options = "optimizer: optimizer.param_groups.0.lr"
    sharded = ["model: _extra_state", "model: count", options]
    # DDP copies the buffers of rank 0 to the others.
    assert [sorted(each) for each in names] == [sharded, [], ["model: _extra_state", options]]
    assert of_rank_0[0][0].endswith(
        "rank 0, and a resume gives it to all ranks. Others have: rank 1"
    )
    assert of_rank_1 == [[], [], []]


def resumed_step(root: Path) -> int | None:
    resumed = tiny.load(root, build("fsdp2"))
    return resumed.step if resumed else None


def test_all_ranks_fall_back_to_the_same_checkpoint_when_a_shard_is_damaged_or_foreign(
    tmp_path: Path,
) -> None:
    def save_two(root: Path) -> None:
        made = build("fsdp2")
        tiny.save(root, made, step=20)
        tiny.save(root, made, step=40)
        made.model.count.add_(1)
        tiny.save(root, made, step=60)

    ranks.run(save_two, 2, tmp_path)
    shard = "model/shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(tmp_path / "epoch_0_step_20" / shard, tmp_path / "epoch_0_step_60" / shard)
    (tmp_path / "epoch_0_step_40" / shard).unlink()
    assert ranks.run(resumed_step, 2, tmp_path) == [20, 20]


class Keeping(torch.optim.SGD):
    """Keeps what *make* makes for each parameter, from the step on that *late* tells."""

    make: Any = staticmethod(
        lambda p: {"mean": p.detach() * 3, "count": torch.tensor(7), "note": "late"}
    )
    late = False

    def step(self, closure: Any = None) -> None:
        if self.late:
            self.state.update(
                {p: self.make(p.detach()) for group in self.param_groups for p in group["params"]}
            )


def keeping(strategy: str, seed: int, *, late: bool, make: Any = Keeping.make) -> SimpleNamespace:
    made = build(strategy, seed)
    made.optimizer = Keeping(made.model.parameters(), lr=0.1)
    made.optimizer.late, made.optimizer.make = late, make
    del made.lr_scheduler
    made.optimizer.step()
    return made


def late_state(root: Path) -> list[str]:
    """Save and load on two ranks; what is refused, in words."""
    tiny.save(root / "run", saved := keeping("fsdp2", 0, late=True))
    for strategy in ("fsdp2", "ddp"):
        tiny.load(root / "run", loaded := keeping(strategy, 1, late=False))
        assert_same_late_state(saved, loaded)
    refused = []
    tiny.save(root / "rows", keeping("fsdp2", 0, late=True, make=lambda p: {"row": torch.ones(2)}))
    for directory, make, late in (
        ("rows", Keeping.make, False),
        ("own", lambda p: {"row": p.to_local() * 2}, True),
        ("own", lambda p: {"deep": {"rows": p}}, True),
    ):
        made = keeping("fsdp2", 1, late=late, make=make)
        with pytest.raises((CheckpointUnusable, RecipeError)) as caught:
            tiny.save(root / directory, made) if late else tiny.load(root / directory, made)
        refused.append(str(caught.value))
    return refused


def assert_same_late_state(one: SimpleNamespace, other: SimpleNamespace) -> None:
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        a, b = one.optimizer.state[mine], other.optimizer.state[theirs]
        assert torch.equal(full(a["mean"]), full(b["mean"]))
        assert isinstance(b["mean"], DTensor) == isinstance(theirs, DTensor)
        assert (b["count"], b["count"].dtype, b["note"]) == (7, torch.int64, "late")


def test_state_that_an_optimizer_makes_late_is_loaded_by_ranks_or_refused(tmp_path: Path) -> None:
    for refused in ranks.run(late_state, 2, tmp_path):
        assert (
            "does not have the parameter's shape\n  where:  optimizer.state.model." in refused[0]
            and "[2], of a" in refused[0]
        )
        assert (
            "different state on each rank" in refused[1] and "optimizer.state.*.row" in refused[1]
        )
        assert "it is not flat" in refused[2] and ".deep" in refused[2]
    assert not (tmp_path / "own/LATEST").exists()
    tiny.load(tmp_path / "run", alone := keeping("single", 1, late=False))
    assert alone.optimizer.state[alone.model.first.weight]["note"] == "late"


def save_alone(root: Path) -> tuple[int, int]:
    """Save with a group of this rank only; (number of ranks in the manifest, of the process group)."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = root / str(dist.get_rank())
    saver = Checkpointer(own, group=groups[dist.get_rank()])
    state = discover(tiny.recipe())
    saver.save(state, step=1, epoch=0, config_yaml="", losses={}, progress={})
    saver.close()
    return Manifest.read(own / "LATEST").world_size, dist.get_world_size()


def test_a_checkpointer_with_a_group_saves_for_the_ranks_of_this_group_only(tmp_path: Path) -> None:
    assert ranks.run(save_alone, 2, tmp_path) == [(1, 2)] * 2
