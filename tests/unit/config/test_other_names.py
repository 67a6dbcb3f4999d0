"""Hints about keys and values: the names of other trainers, keys in the wrong section, and mistakes in YAML."""

from collections.abc import Callable
from pathlib import Path

import pytest

from automodel_ckpt.cli.train import main
from tests.support.runs.recipes import SMALLEST


@pytest.fixture
def problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Return what ckpt-train reports for the text of a recipe and for words."""
    (tmp_path / "data.txt").write_text("some text\n")
    monkeypatch.chdir(tmp_path)

    def reported(text: str, *words: str) -> str:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(SMALLEST + text)
        assert main([str(recipe), "--dry-run", *words]) == 2
        return capsys.readouterr().err

    return reported


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("learning_rate: 1e-5\n", [], "here: optimizer.lr"),
        ("", ["--checkpoint.files_per_node", "1"], "remove it: each rank writes its own files"),
        ("", ["--per_device_train_batch_size", "4"], "here: step_scheduler.local_batch_size"),
        (
            "gradient_accumulation_steps: 4\n",
            [],
            "here: step_scheduler.global_batch_size (local_batch_size x ranks x accumulation steps)",
        ),
        ("max_seq_length: 512\n", [], "here: dataset.seq_length"),
        ("  max_seq_length: 512\n", [], "did you mean dataset.seq_length?"),
        ("optimizer: {name: adamw}\n", [], "here: optimizer (_target_: torch.optim.SGD)"),
        ("use_liger_kernel: true\n", [], "computed in chunks without a key"),
        ("bf16: true\n", [], "here: distributed.mixed_precision: bfloat16"),
        ("", ["--bf16", "false"], "here: distributed.mixed_precision: none"),
        ("", ["--stage=rm"], "here: recipe: reward_model"),
        ("", ["--push_to_hub"], "here: hub.repo (a section: hub: {repo: ORG/NAME})"),
        ("", ["--peft.rank", "8"], "here: peft.r"),
        ("", ["--output-dir=x"], "here: checkpoint.checkpoint_dir"),
        ("", ["--wandb_project", "x"], "here: logging.trackers ({wandb: {project: x}})"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(
    problem: Callable[..., str], text: str, words: list[str], hint: str
) -> None:
    assert hint in problem(text, *words)


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("", ["--lr", "1e-4"], "did you mean optimizer.lr?"),
        ("extend: base.yaml\n", [], "did you mean extends?"),
        ("", ["--wandb.project", "x"], "here: logging.trackers"),
        ("strategy: ddp\n", [], "did you mean distributed.strategy"),
        ("loss_fn: mine.focal\n", [], "name a class or function in loss_fn._target_"),
        ("", ["--optimizer.betas", "0.9, 0.95"], "write a list as [A, B]"),
        ("", ["--step_scheduler.max_steps", "1.5"], "correct the value"),
        ("", ["--model.from_pretrained", ""], "model.from_pretrained must be non-empty"),
        ("", ["--checkpoint.checkpoint_dir", "./some/x/../model"], "to another directory"),
    ],
)
def test_a_hint_names_what_was_probably_meant(
    problem: Callable[..., str], text: str, words: list[str], hint: str
) -> None:
    assert hint in problem(text, *words)
