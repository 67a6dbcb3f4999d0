"""An error on one of two ranks, before a collective that the other one is in: both raise it, and none waits."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions, loader
from automodel_ckpt.checkpoint.export import consolidate
from automodel_ckpt.checkpoint.saving import publisher
from automodel_ckpt.checkpoint.saving.background import Background
from automodel_ckpt.checkpoint.saving.planner import Planner
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig
from automodel_ckpt.config.keys.monitoring import LoggingConfig
from automodel_ckpt.config.keys.ranks_and_steps import StepSchedulerConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.errors import AutomodelError, LeaseLost, RecipeError
from automodel_ckpt.logs.timeline import Timeline
from automodel_ckpt.parallel.mesh_sizes import RankLayout, Sizes
from automodel_ckpt.parallel.ranks.stop import StopRequest
from automodel_ckpt.training.counters.rules import Spike
from automodel_ckpt.training.counters.step_scheduler import StepScheduler
from automodel_ckpt.training.model import deferred_model
from automodel_ckpt.training.saves import saves as saves_module
from automodel_ckpt.training.saves.saves import Saves
from automodel_ckpt.training.values.run_log import RunLog
from automodel_ckpt.training.watch import hang_watch as hang_watch_module
from automodel_ckpt.training.watch import replicas as replica_check
from automodel_ckpt.training.watch.hang_watch import HangWatch
from automodel_ckpt.training.watch.replicas import ReplicaCheck
from tests.distributed.saves.test_hf_layout import make_base
from tests.distributed.saves.test_inline_export import by_rows, made_of
from tests.support import ranks
from tests.support.checkpoints import is_intact
from tests.support.models import tiny

_HANG_SECONDS = 6


class Case:
    """One case in one rank process: a separate directory, a group with a short timeout, and patches."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.patch = patch
        self.rank = dist.get_rank()
        timeout = timedelta(seconds=_HANG_SECONDS)
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self.layout = RankLayout(
            self.rank, Sizes(dp_shard=2), self.rank, torch.device("cpu"), self.group
        )
        self.open: list[Checkpointer] = []

    def checkpointer(self, **options: Any) -> Checkpointer:
        made = Checkpointer(self.root, group=self.group, options=CheckpointOptions(**options))
        self.open.append(made)
        return made

    def fails_on(self, rank: int, owner: Any, name: str, error: Exception) -> None:
        """Make the function *name* of *owner* raise *error* on *rank*."""

        def fail(*_: Any, **__: Any) -> NoReturn:
            raise error

        if self.rank == rank:
            self.patch.setattr(owner, name, fail)

    def run_log(self) -> RunLog:
        log = RunLog(LoggingConfig(), self.layout)
        log.open(self.root, lambda: None)
        return log

    def saves(self, **config: Any) -> Saves:
        sections = {"checkpoint": CheckpointConfig(), "hub": None, **config}
        recipe = SimpleNamespace(
            config=SimpleNamespace(**sections),
            checkpointer=self.checkpointer(),
            step_scheduler=StepScheduler(StepSchedulerConfig(max_steps=8)),
            run_log=SimpleNamespace(timeline=Timeline()),
            config_yaml="",
            layout=self.layout,
        )
        return Saves(recipe)


STATE = {"model": nn.Linear(2, 2)}


def disk_full() -> OSError:
    return OSError(28, "No space left on device")


def what_follows_a_save(case: Case) -> None:
    saver = case.checkpointer()
    for step in (1, 2):  # The second save reuses the plan of the first.
        with pytest.raises(AutomodelError, match=r"reporting epoch_0_step_\d \(the checkpoint"):
            saver.save(STATE, step=step, epoch=0, on_saved=lambda report: 1 // 0)
    assert (case.root / "LATEST").resolve().name == "epoch_0_step_2"
    saver.save(STATE, step=3, epoch=0, on_saved=lambda report: 1 // 0)


def an_asynchronous_save_that_cannot_be_prepared(case: Case) -> None:
    case.fails_on(1, Planner, "forecast", ValueError("odd state"))
    case.checkpointer(is_async=True).save(STATE, step=1, epoch=0)


def a_failed_asynchronous_save_that_cannot_be_stopped(case: Case) -> None:
    saver = case.checkpointer(is_async=True)
    saver.save(STATE, step=1, epoch=0)
    saver.wait_for_save()
    case.fails_on(0, publisher, "run_all", disk_full())
    case.fails_on(0, Background, "start", disk_full())
    case.fails_on(1, Background, "abandon", OSError(11, "cannot start a process"))
    saver.save(STATE, step=2, epoch=0)
    saver.wait_for_save()


def the_best_checkpoint(case: Case) -> None:
    saver = case.checkpointer()
    saver.save(STATE, step=1, epoch=0)
    case.fails_on(0, saver._settings.run, "best", PermissionError(13, "Permission denied"))
    saver.exports.export_best()


def a_log_that_cannot_be_truncated_at_the_start(case: Case) -> None:
    if case.rank == 0:
        (case.root / "training.jsonl").mkdir(parents=True)
    case.run_log().resume(StepScheduler(StepSchedulerConfig(max_steps=8)), None)


def a_log_that_cannot_be_truncated_after_a_spike(case: Case) -> None:
    log = case.run_log()
    scheduler = StepScheduler(StepSchedulerConfig(max_steps=8))
    log.resume(scheduler, None)
    if case.rank == 0:
        (case.root / "validation.jsonl").mkdir()
    log.roll_back(scheduler, Spike(3, "the loss is 7"), 1)


def uploads_that_cannot_be_started(case: Case) -> None:
    case.fails_on(0, saves_module, "clear_links", disk_full())
    case.saves().start_hub_uploads(ExitStack())


def a_checkpoint_that_cannot_be_verified(case: Case) -> None:
    saver = case.checkpointer()
    saver.save(STATE, step=1, epoch=0)
    case.fails_on(1, loader, "verify", MemoryError())
    saver.load(STATE)


def a_download(case: Case) -> None:
    saver = case.checkpointer(restore_from="s3://bucket/run")
    case.patch.setattr(saver.transfers, "open", lambda: None)
    fetcher: Any = SimpleNamespace(fetch=None)
    case.fails_on(0, fetcher, "fetch", ValueError("odd answer"))
    if case.rank == 0:
        saver.transfers.fetcher = fetcher
    saver.load(STATE)


def checksums_of_replicas(case: Case) -> None:
    case.fails_on(1, replica_check, "checksum", RuntimeError("out of memory"))
    ReplicaCheck(nn.Linear(2, 2), case.layout, is_replicated=True).check(3)


def stacks_of_a_hang(case: Case) -> None:
    case.fails_on(1, hang_watch_module, "StackDump", disk_full())
    loop = SimpleNamespace(
        config=RecipeConfig(),
        layout=case.layout,
        run_log=SimpleNamespace(timeline=Timeline()),
        checkpointer=SimpleNamespace(directory=case.root, nodes=None),
        stop_request=StopRequest(),
    )
    HangWatch(loop).__enter__()


def the_files_of_the_base(case: Case) -> None:
    missing = RecipeError("a file is missing", where="model", value="", hint="")
    case.fails_on(1, deferred_model, "_on_meta", missing)
    case.fails_on(0, deferred_model, "_on_meta", deferred_model.NotDeferrable("odd"))
    section: Any = None
    deferred_model.build_deferred(
        section, section, base=None, auto_class=None, seed=0, group=case.group
    )


def with_parameter(value: torch.Tensor) -> dict[str, Any]:
    module = nn.Module()
    module.weight = nn.Parameter(value)
    return {"model": module}


def partial_sums(placement: Placement) -> torch.Tensor:
    mesh = DeviceMesh("cpu", [0, 1])
    return DTensor.from_local(torch.ones(2, 2), mesh, [placement])


def a_model_with_partial_sums(case: Case) -> None:
    case.checkpointer().save(with_parameter(partial_sums(Partial())), step=1, epoch=0)


def an_optimizer_with_partial_sums(case: Case) -> None:
    weight = partial_sums(Replicate())
    model = with_parameter(weight)["model"]
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["sum"] = partial_sums(Partial())
    case.checkpointer().save({"model": model, "optimizer": optimizer}, step=1, epoch=0)


def a_load_into_partial_sums(case: Case) -> None:
    saver = case.checkpointer()
    saver.save(with_parameter(partial_sums(Replicate())), step=1, epoch=0)
    saver.load(with_parameter(partial_sums(Partial())))


def a_mesh_with_ranks_in_reverse_order(case: Case) -> None:
    mesh = DeviceMesh("cpu", [1, 0])
    state = with_parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]))
    case.checkpointer().save(state, step=1, epoch=0)


def a_tensor_of_other_dtypes(case: Case) -> None:
    state = with_parameter(torch.ones(2, 2, dtype=(torch.float32, torch.bfloat16)[case.rank]))
    case.checkpointer().save(state, step=1, epoch=0)


class Extra(nn.Module):
    def get_extra_state(self) -> Any:
        return torch.ones(2) if dist.get_rank() == 1 else "text"


def a_tensor_on_one_rank_and_a_value_on_the_other(case: Case) -> None:
    case.checkpointer().save({"model": Extra()}, step=1, epoch=0)


class OwnScale(torch.optim.SGD):
    """Keeps a number per parameter that is stored once, for all ranks."""

    def set(self, scale: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["scale"] = torch.tensor(scale)


def optimizer_state_that_differs_under_a_kept_plan(case: Case) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    model = with_parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]))["model"]
    optimizer = OwnScale(model.parameters())
    saver = case.checkpointer(is_async=True)
    for step, scale in ((1, 1.0), (2, 2.0), (3, 3.0 + case.rank)):
        optimizer.set(scale)
        kept = tiny.kept_plan(saver)
        saver.save({"model": model, "optimizer": optimizer}, step=step, epoch=0)
        assert (tiny.kept_plan(saver) is kept) == (step == 2)


CASES: dict[Callable[[Case], None], tuple[int | None, str]] = {
    what_follows_a_save: (0, "reporting epoch_0_step_3 (the checkpoint itself is safe) failed"),
    an_asynchronous_save_that_cannot_be_prepared: (1, "preparing asynchronous saves failed"),
    a_failed_asynchronous_save_that_cannot_be_stopped: (0, "saving epoch_0_step_2 failed"),
    the_best_checkpoint: (0, "looking for the best checkpoint failed"),
    a_log_that_cannot_be_truncated_at_the_start: (0, "a log of the run cannot be truncated"),
    a_log_that_cannot_be_truncated_after_a_spike: (0, "a log of the run cannot be truncated"),
    uploads_that_cannot_be_started: (0, "removing the links of earlier uploads failed"),
    a_checkpoint_that_cannot_be_verified: (1, "verifying epoch_0_step_1 failed"),
    a_download: (0, "downloading a checkpoint failed"),
    checksums_of_replicas: (1, "comparing replicas after step 3 failed"),
    stacks_of_a_hang: (1, "No space left on device"),
    the_files_of_the_base: (1, "a file is missing"),
    a_model_with_partial_sums: (
        None,
        "attribute 'model', weight; the placement Partial(sum): no rank",
    ),
    an_optimizer_with_partial_sums: (
        None,
        "'optimizer', optimizer.state.model.weight.sum; the placement Partial(sum): no rank has",
    ),
    a_load_into_partial_sums: (
        None,
        "weight: saved as F32 [2, 2], here F32 [2, 2] with the placement Partial(sum)",
    ),
    a_mesh_with_ranks_in_reverse_order: (
        None,
        "a tensor is divided among the ranks of a mesh in an order that a checkpoint cannot store",
    ),
    a_tensor_of_other_dtypes: (
        None,
        "model: weight; F32 [2, 2] on rank 0, BF16 [2, 2] on rank 1; state that differs",
    ),
    optimizer_state_that_differs_under_a_kept_plan: (
        None,
        "different state on each rank for sharded parameters: optimizer.state.*.scale",
    ),
    a_tensor_on_one_rank_and_a_value_on_the_other: (
        None,
        "model: _extra_state; a tensor on rank 1, another value on rank 0",
    ),
}
"""Each case, the rank that fails (None: all find it together), and the beginning of what all ranks raise."""


def outcomes_of_all(root: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for function in CASES:
        with pytest.MonkeyPatch.context() as patch:
            case = Case(root / function.__name__, patch)
            try:
                function(case)
                found[function.__name__] = "nothing was raised"
            except AutomodelError as error:
                problem = error.problems[0]
                found[function.__name__] = (
                    f"{problem.what}: {problem.where}; {problem.value}; {problem.hint}"
                )
            # Raised on this rank only; RuntimeError is that of a collective in which it waited.
            except Exception as error:
                found[function.__name__] = f"{type(error).__name__}: {error}"
            for each in case.open:
                each.close()
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[dict[str, str]]]:
    with tempfile.TemporaryDirectory() as directory:
        yield ranks.run(outcomes_of_all, 2, Path(directory), timeout=120)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_all_ranks_raise_it(outcomes: list[dict[str, str]], case: Callable[[Case], None]) -> None:
    rank, expected = CASES[case]
    for found in outcomes:
        first = "" if rank is None else f"rank {rank}: "
        assert found[case.__name__].startswith(first)
        assert expected in found[case.__name__]


def failing_exports(base: Path, root: Path) -> list[str]:
    """The failures of three exports: on a full disk, after another run took over, and none."""
    model, assets = made_of(base)
    by_rows(model)
    failures: list[Exception] = [
        OSError(28, os.strerror(28)),
        LeaseLost("taken over", where="run", value="", hint=""),
    ]
    messages = []
    for step in (20, 40, 60):
        write = consolidate.write_all
        if failures:
            consolidate.write_all = Mock(side_effect=failures.pop(0))
        try:
            report = tiny.save(
                root,
                SimpleNamespace(model=model),
                step=step,
                save_consolidated="every",
                assets={"model": assets},
            )
            messages.append(str(report.export_failure))
        except LeaseLost:
            messages.append("LeaseLost")
        finally:
            consolidate.write_all = write
    return messages


def test_a_failed_export_is_reported_on_all_ranks_and_leaves_its_checkpoint_intact(
    tmp_path: Path,
) -> None:
    make_base(tmp_path / "base", tied=False)
    for failed, *others in ranks.run(failing_exports, 2, tmp_path / "base", tmp_path / "run"):
        assert "rank 0" in failed and "ENOSPC" in failed and "nothing was changed" in failed
        assert others == ["LeaseLost", "None"]
    for step in (20, 40, 60):
        path = tmp_path / f"run/epoch_0_step_{step}"
        assert is_intact(path, deep=True)
        exports = [each.name for each in (path / "model").glob("*consolidated*")]
        assert exports == (["consolidated"] if step == 60 else [])
