"""The section ``evaluation.harness``: tasks on the model in training, on any ranks, without a trace in the training.

Most tests use a stand-in for the library. ``make harness`` installs it, and runs the others.
"""

import json
import os
import random
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.config.callables.prepare import check_targets
from automodel_ckpt.config.callables.trust import Trust
from automodel_ckpt.config.keys.monitoring import HarnessConfig
from automodel_ckpt.config.load import load_recipe
from automodel_ckpt.config.overrides import parse
from automodel_ckpt.errors import RecipeError, Stopped
from automodel_ckpt.logs.follow import values_of
from automodel_ckpt.models.measure.harness import HarnessTasks, TaskMetric
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.measure.evaluated_model import tasks_of
from tests.support import ranks
from tests.support.runs.training import (
    EXPORT,
    RECIPE,
    VALIDATION,
    Recipe,
    build,
    steps_of,
    train,
    write_recipe,
)
from tests.unit.cli.test_eval import ROWS, TASK

HARNESS = "evaluation: {harness: {tasks: [pick], every_steps: 2}}\n"
SHORT = ("--step_scheduler.max_steps=5", "--step_scheduler.ckpt_every_steps=4")
BEST = ("--checkpoint.best_metric_key=eval_pick_acc", "--checkpoint.best_mode=max")
needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")


def run_stand_in(
    model: Any,
    tokenizer: Any,
    given: HarnessTasks,
    index: Any,
    *,
    autocast: Any,
    before_forward: Any,
) -> list[TaskMetric]:
    """Run two forward passes, and use everything that an evaluation must restore."""
    random.seed(0)
    torch.manual_seed(0)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    model.eval()
    scores = []
    for start in (3, 5):
        before_forward()
        tokens = torch.arange(start, start + 9 + torch.randint(4, ()).item())[None]
        with torch.no_grad():
            scores.append(model(tokens).logits.float().log_softmax(-1)[0, :-1].mean().item())
    value = sum(scores) + (given.limit or 0)
    return [TaskMetric("pick", "acc", value, 0.5), TaskMetric("pick", "perplexity", -value, None)]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("automodel_ckpt.training.measure.evaluated_model.run_tasks", run_stand_in)
    for name in ("require_harness", "check_tasks", "check_data"):
        monkeypatch.setattr(
            f"automodel_ckpt.training.measure.evaluated_model.{name}", lambda *given: None
        )


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]


def benchmarks_of(run: Path) -> dict[int, float]:
    """The metric of each step that benchmarks ran after."""
    found = [line for line in lines_of(run) if line.get("event") == "evaluation"]
    return {line["step"]: line["eval_pick_acc"] for line in found}


def trained(directory: Path, name: str, text: str, *words: str, num_ranks: int = 1) -> Any:
    run = f"--checkpoint.checkpoint_dir={directory / name}"
    recipe = write_recipe(directory, text)
    return ranks.run(partial(train, recipe, run, *SHORT, *words), num_ranks, init=False)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("ddp", marks=pytest.mark.further)])
def test_tasks_run_at_their_steps_on_all_ranks_and_training_is_the_same(
    strategy: str, stand_in: None, tmp_path: Path
) -> None:
    words = (f"--distributed.strategy={strategy}", EXPORT)
    without = trained(tmp_path, "without", RECIPE, *words, num_ranks=2)
    found = trained(tmp_path, "with", RECIPE + HARNESS, *words, *BEST, num_ranks=2)
    for digests in (*without, *found):
        # It has the state of the section.
        digests.pop("step_scheduler", None)
    assert found == without
    assert steps_of(tmp_path / "with") == steps_of(tmp_path / "without")
    values = benchmarks_of(tmp_path / "with")
    assert list(values) == [2, 4, 5]
    losses = json.loads((tmp_path / "with/epoch_0_step_4/losses.json").read_text())
    assert losses["eval_pick_acc"] == values[4]
    best = max((4, 5), key=values.__getitem__)
    assert os.readlink(tmp_path / "with/LOWEST_VAL") == f"epoch_0_step_{best}"
    # The tokenizer of the export has no other padding.
    exports = [tmp_path / name / "LATEST/model/consolidated" for name in ("with", "without")]
    assert len({(path / "tokenizer.json").read_bytes() for path in exports}) == 1
    page = tmp_path / "page.html"
    assert main(["plot", str(tmp_path / "with"), "-o", str(page)]) == 0
    assert "Benchmark pick_acc<" in page.read_text()
    assert "pick_acc_stderr" not in page.read_text()
    sent = values_of(lines_of(tmp_path / "with")[0])
    assert sent == {
        "eval/pick_acc": values[2],
        "eval/pick_acc_stderr": 0.5,
        "eval/pick_perplexity": -values[2],
    }


def test_a_stop_ends_them_between_two_forward_passes_and_the_next_start_makes_up(
    stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = RECIPE + VALIDATION + HARNESS + "ema: {decay: 0.5, validate: true}\n"
    trained(tmp_path, "whole", text, *BEST)
    run = f"--checkpoint.checkpoint_dir={tmp_path / 'stopped'}"
    recipe = build(write_recipe(tmp_path, text), run, *SHORT, *BEST)

    def stop_in_second(*given: Any, before_forward: Any, **options: Any) -> Any:
        before_forward()
        recipe.stop_request.requested = 15
        before_forward()

    monkeypatch.setattr("automodel_ckpt.training.measure.evaluated_model.run_tasks", stop_in_second)
    try:
        recipe.setup()
        with pytest.raises(Stopped, match="after step 2, which is saved"):
            recipe.run()
        assert recipe.model.training
    finally:
        recipe.stop_request.requested = None
        recipe.close()
    monkeypatch.setattr("automodel_ckpt.training.measure.evaluated_model.run_tasks", run_stand_in)
    trained(tmp_path, "stopped", text, *BEST)
    assert benchmarks_of(tmp_path / "stopped") == benchmarks_of(tmp_path / "whole")
    targets = [os.readlink(tmp_path / name / "LOWEST_VAL") for name in ("stopped", "whole")]
    values = benchmarks_of(tmp_path / "whole")
    # The step of the stop has a checkpoint here only.
    assert targets[1] == f"epoch_0_step_{max((4, 5), key=values.__getitem__)}"
    assert targets[0] == f"epoch_0_step_{max(values, key=values.__getitem__)}"


def test_mistakes_are_errors_before_weights_are_read(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, RECIPE + HARNESS)
    for words, expected in (
        (["--evaluation.harness.tasks=[]"], "evaluation.harness.tasks"),
        (["--evaluation.harness.every_steps=0"], "evaluation.harness.every_steps"),
        (["--evaluation.harness.limit=0"], "evaluation.harness.limit"),
        (["--evaluation.harness.num_fewshot=-1"], "evaluation.harness.num_fewshot"),
        (["--evaluation.harness.batch_size=0"], "evaluation.harness.batch_size"),
        (["--distributed.pp_size=2"], "ckpt eval runs tasks on a checkpoint"),
        (["--distributed.cp_size=2"], "ckpt eval runs tasks on a checkpoint"),
        (["--distributed.tp_size=2", "--distributed.sequence_parallel"], "sequence_parallel"),
    ):
        with pytest.raises(RecipeError, match=expected):
            build(recipe, *words)
    for words, expected in (
        (["--checkpoint.best_metric_key=eval_pick_acc"], "set checkpoint.best_mode: max"),
        (["--checkpoint.best_metric_key=accuracy"], "eval_TASK_METRIC"),
        (["--step_scheduler.early_stopping={}"], "nothing measures this metric"),
    ):
        with pytest.raises(RecipeError, match=expected):
            build(recipe, *words).check_measurements()


def test_the_library_must_be_installed_and_task_files_be_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path, RECIPE + HARNESS)
    monkeypatch.setattr("automodel_ckpt.models.measure.harness.find_spec", lambda name: None)
    run = build(recipe, f"--checkpoint.checkpoint_dir={tmp_path / 'run'}")
    with pytest.raises(RecipeError, match=r"pip install 'automodel_ckpt\[eval\]'"):
        run.setup()
    run.close()
    assert not hasattr(run, "model")
    tasks = tmp_path / "tasks"
    line = parse([f"--evaluation.harness.include_path={tasks}"])
    loaded = load_recipe(recipe, line.overrides, problems=line.problems)
    with pytest.raises(RecipeError) as caught:
        check_targets(loaded, Trust(["tests"]))
    message = str(caught.value)
    assert "task files can contain code, and this directory is not trusted" in message
    assert "where:  --evaluation.harness.include_path" in message
    assert f"allow them with --trust {tasks}" in message
    for trusted in (tasks, tmp_path):
        check_targets(loaded, Trust(["tests", str(trusted)]))


# ---------------------------------------------------------------- the library itself


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    data = path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (path / "pick.yaml").write_text(TASK.format(data=data))
    return path


def run_with_library(recipe_file: Path, tasks: Path, *words: str) -> Any:
    line = parse([f"--evaluation.harness.include_path={tasks}", *SHORT, *words])
    loaded = load_recipe(recipe_file, line.overrides, problems=line.problems)
    loaded = check_targets(loaded, Trust(["tests", str(tasks)]))
    recipe: LLMFinetune = Recipe(loaded.config, config_yaml=loaded.to_yaml())
    try:
        recipe.setup()
        recipe.run()
    finally:
        recipe.close()


@needs_harness
@pytest.mark.parametrize(
    "words",
    [
        ["--distributed.strategy=fsdp2"],
        ["--distributed.strategy=ddp"],
        ["--distributed.tp_size=2"],
        ["--peft={r: 2, init: gaussian}", "--peft.base_dir=base"],
    ],
    ids=["fsdp2", "ddp", "tensor parallel", "adapters"],
)
def test_values_are_those_of_ckpt_eval_and_training_is_the_same(
    words: list[str],
    tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Large weights, so that the choices have different probabilities.
    words = [*words, "--optimizer.lr=0.3", "--evaluation.harness.batch_size=2"]
    run = f"--checkpoint.checkpoint_dir={tmp_path / 'run'}"
    recipe = write_recipe(tmp_path, RECIPE + HARNESS)
    ranks.run(partial(run_with_library, recipe, tasks, run, *words), 2, init=False, timeout=300)
    values = benchmarks_of(tmp_path / "run")
    assert list(values) == [2, 4, 5]
    for step in (4, 5):
        path = tmp_path / f"run/epoch_0_step_{step}"
        command = ["eval", str(path), "--tasks", "pick", "--include-path", str(tasks), "--json"]
        assert main(command) == 0
        (metric,) = json.loads(capsys.readouterr().out)["metrics"]
        assert metric["value"] == values[step]
    text = RECIPE
    trained(tmp_path, "without", text, *words[:-1], num_ranks=2)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "without")


def test_they_select_the_best_checkpoint_and_end_the_run(stand_in: None, tmp_path: Path) -> None:
    stopping = "{metric: eval_pick_acc, patience: 1, min_delta: 1000}"
    words = (f"--step_scheduler.early_stopping={stopping}", "--step_scheduler.ckpt_on_best")
    trained(tmp_path, "run", RECIPE + VALIDATION + HARNESS, *words, *BEST)
    # The second value does not improve by 1000.
    assert list(benchmarks_of(tmp_path / "run")) == [2, 4]
    assert [step["step"] for step in steps_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run/epoch_0_step_2/losses.json").read_text())["val_loss"] is None
    # Steps without benchmarks have null.
    other = ("--evaluation.harness.every_steps=null", "--evaluation.harness.limit=99")
    trained(tmp_path, "end", RECIPE + VALIDATION + HARNESS, *other, *BEST)
    values = benchmarks_of(tmp_path / "end")
    assert list(values) == [5]
    assert values[5] > 0
    losses = json.loads((tmp_path / "end/epoch_0_step_4/losses.json").read_text())
    assert losses["eval_pick_acc"] is None
    assert losses["val_loss"] is not None


def test_each_key_reaches_the_library() -> None:
    settings = HarnessConfig(
        tasks=["pick"],
        limit=3,
        num_fewshot=2,
        include_path="~/tasks",
        batch_size=4,
        chat_template=True,
    )
    directory = Path("~/tasks").expanduser()
    assert tasks_of(settings) == HarnessTasks(["pick"], directory, 2, 3, 4, True)
