"""The steps of a device that computes while the host continues, forced on a CPU: same results."""

import math
from pathlib import Path
from typing import Any

import pytest

from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.distributed.kinds.test_training import lines, losses, run
from tests.support.runs.training import (
    RECIPE,
    VALIDATION,
    Recipe,
    killed_after,
    steps_of,
    with_loop,
)
from tests.support.runs.training_parts import QueuesSteps

AheadRecipe = with_loop(Recipe, QueuesSteps)


def assert_same_steps(queued: Path, waiting: Path) -> None:
    """Records are equal. The norm is the sum of squares in another order, so its last bit may differ."""
    records = []
    for directory in (queued, waiting):
        steps = steps_of(directory)
        norms = [float.fromhex(step.pop("grad_norm")) for step in steps]
        records.append((steps, norms))
    assert records[0][0] == records[1][0]
    assert records[0][1] == pytest.approx(records[1][1], rel=1e-14)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.further), 2])
def test_a_queued_run_logs_and_saves_what_a_run_with_waits_does(
    tmp_path: Path, num_ranks: int
) -> None:
    sizes = ("--step_scheduler.local_batch_size=2", "--clip_grad_norm=0.5")
    text = RECIPE + VALIDATION + "ema: {decay: 0.5, start_step: 2, validate: true}\n"
    results = []
    for name, counted in (("waiting", Recipe), ("queued", AheadRecipe)):
        results.append(
            run(tmp_path, *sizes, name=name, num_ranks=num_ranks, text=text, recipe_class=counted)
        )
    waiting, queued = results
    assert queued == waiting
    assert_same_steps(tmp_path / "queued", tmp_path / "waiting")
    kinds = []
    for name in ("waiting", "queued"):
        records = lines(tmp_path / name / "training.jsonl")
        kinds.append([(record["step"], record.get("event")) for record in records])
        assert all(record["tps"] > 0 for record in records if "event" not in record)
    assert kinds[0] == kinds[1]
    for directory in sorted((tmp_path / "waiting").glob("epoch_*")):
        assert losses(tmp_path / "queued" / directory.name) == losses(directory)


def test_a_queued_run_that_was_killed_resumes_exactly(tmp_path: Path) -> None:
    straight = run(tmp_path, name="straight", recipe_class=AheadRecipe)
    killed = killed_after(7, recipe_class=AheadRecipe)
    failure_free = ("--step_scheduler.ckpt_every_steps=3",)
    with pytest.raises(Exception, match=r"SIGKILL|signal 9|-9"):
        run(tmp_path, *failure_free, name="killed", recipe_class=killed)
    # The record of step 7 was still on the device; it is no part of a checkpoint either.
    assert [step["step"] for step in steps_of(tmp_path / "killed")] == [1, 2, 3, 4, 5, 6]
    resumed = run(tmp_path, *failure_free, name="killed", recipe_class=AheadRecipe)
    assert resumed == straight
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "straight")


class Broken(LLMFinetune.loop_class):
    def clip_gradients(self) -> Any:
        if self.step_scheduler.step == 2:
            parameter = next(p for p in self.model.parameters() if p.grad is not None)
            assert parameter.grad is not None
            parameter.grad.view(-1)[0] = math.nan
        return super().clip_gradients()


@pytest.mark.parametrize(
    "optimizer", [pytest.param("torch.optim.SGD", marks=pytest.mark.further), None]
)
def test_an_update_that_is_not_finite_is_skipped_on_the_device(
    tmp_path: Path, optimizer: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    more: tuple[str, ...] = ("--ema={decay: 0.5}",)
    if optimizer is not None:
        more = (*more, f"--optimizer._target_={optimizer}", "--optimizer.fused=true")
    results = {}
    for name, recipe_class in (("waiting", Recipe), ("queued", AheadRecipe)):
        broken = with_loop(recipe_class, Broken)
        results[name] = run(tmp_path, *more, name=name, recipe_class=broken)
        records = lines(tmp_path / name / "training.jsonl")
        assert records[2]["grad_norm"] is None
        assert capfd.readouterr().err.count("step 3: the gradient norm is nan, no update") == 1
    assert results["queued"] == results["waiting"]
