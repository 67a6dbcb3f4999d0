"""The recipe in a user's own file: examples/custom_recipe, and the guide that explains it."""

import json
import math
import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

import automodel_ckpt
from automodel_ckpt.cli.train import main
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from tests.support import ranks
from tests.support.runs import training
from tests.support.runs.training import steps_of
from tools.support import log_lines, step_lines

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "custom_recipe"
GUIDE = (ROOT / "docs" / "guides" / "write-a-recipe.md").read_text()
DATA = (
    "{_target_: automodel_ckpt.examples.data.python_docs.language_modeling, "
    "seq_length: 32, max_samples: %d, split: %s}"
)
SHORT = (
    "--step_scheduler.max_steps=5",
    "--step_scheduler.ckpt_every_steps=2",
    f"--dataset={DATA % (60, 'train')}",
    f"--validation_dataset={DATA % (8, 'validation')}",
    "--model.from_config.num_hidden_layers=1",
)


OFTEN = (*SHORT, "--lookahead.every_steps=2")


def trained(*overrides: str, name: str = "lookahead", dies_after: int = 0) -> dict[str, str]:
    trust = [str(EXAMPLE / f"{name}.py")]
    return training.train(EXAMPLE / f"{name}.yaml", *overrides, dies_after=dies_after, trust=trust)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.further), 2])
def test_a_killed_run_goes_on_exactly_with_the_attribute_that_the_user_added(
    num_ranks: int, tmp_path: Path
) -> None:
    whole, killed = (
        f"--checkpoint.checkpoint_dir={tmp_path / name}" for name in ("whole", "killed")
    )
    expected = ranks.run(partial(trained, whole, *OFTEN), num_ranks, init=False)
    dying = partial(trained, killed, *OFTEN, dies_after=3)
    ended = ranks.outcomes(dying, num_ranks, init=False)
    assert -9 in [outcome.exitcode for outcome in ended]
    assert ranks.run(partial(trained, killed, *OFTEN), num_ranks, init=False) == expected
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")
    assert (
        len(list((tmp_path / "whole/LATEST/slow_weights").glob("shard-*.safetensors"))) == num_ranks
    )


def test_the_users_section_is_checked_like_any_other() -> None:
    with pytest.raises(RecipeError, match=r"unknown key lookahead\.shair"):
        trained("--lookahead.shair=0.9")
    with pytest.raises(RecipeError, match=r"lookahead\.share"):
        trained("--lookahead.share=1.5")


def test_the_code_does_not_run_without_trust() -> None:
    with pytest.raises(RecipeError, match="is not trusted"):
        automodel_ckpt.train(EXAMPLE / "lookahead.yaml")


_OLD = """\
from automodel_ckpt.recipes.llm_finetune import LLMFinetune
from automodel_ckpt.training.loop import TrainingLoop

class OldLoop(TrainingLoop):
    def finish_step(self, batch, launched):
        return super().finish_step(batch, launched)

class Sets(LLMFinetune):
    def build_validation_sets(self):
        return {}

class Steps(LLMFinetune):
    loop_class = OldLoop
"""


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("name", "method", "present"),
    [
        ("Sets", "Sets.build_validation_sets", "build_dataloader"),
        ("Steps", "OldLoop.finish_step", "step"),
    ],
)
def test_a_method_that_is_not_called_any_more_is_an_error(
    options: Sequence[str],
    name: str,
    method: str,
    present: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = tmp_path / "old.py"
    code.write_text(_OLD)
    recipe = tmp_path / "old.yaml"
    text = (EXAMPLE / "lookahead.yaml").read_text().replace("lookahead:\n  share: 0.8\n", "")
    recipe.write_text(text.replace("lookahead.py:LookaheadFinetune", f"old.py:{name}"))
    directory = f"--checkpoint.checkpoint_dir={tmp_path / 'run'}"
    assert main(["--trust", str(code), str(recipe), *SHORT, directory, *options]) == 2
    text = capsys.readouterr().err
    assert method in text and f"override {present} instead" in text


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.further)])
def test_a_changed_loss_of_dpo_counts_pairs_and_starts_from_its_reference(
    num_ranks: int, tmp_path: Path
) -> None:
    rows = tmp_path / "pairs.jsonl"
    pair = {"prompt": "Is it wet? ", "chosen": "It is wet.", "rejected": "Seven blue."}
    rows.write_text("".join(json.dumps(pair) + "\n" for _ in range(16)))
    data = f"{{_target_: automodel_ckpt.data.preference.pairs, path: {rows}}}"
    options = (
        f"--checkpoint.checkpoint_dir={tmp_path / 'run'}",
        f"--dataset={data}",
        f"--validation_dataset={data}",
        "--step_scheduler={global_batch_size: 8, local_batch_size: 4, max_steps: 5}",
        "--rpo.sft_weight=0.5",
    )
    ranks.run(partial(trained, *options, name="rpo"), num_ranks, init=False)
    first, *others = step_lines(tmp_path / "run/training.jsonl")
    # Equal models: log(2) for each pair, and half the loss of fine-tuning of a model with fresh weights.
    assert first["loss"] == pytest.approx(math.log(2) + 0.5 * math.log(1024), rel=0.02)
    assert (first["pairs"], first["margin"], others[-1]["accuracy"]) == (8, 0.0, 1.0)
    assert others[-1]["reward_chosen"] > 0
    validation = log_lines(tmp_path / "run/validation.jsonl")[-1]
    assert validation["val_accuracy"] == 1.0 and validation["pairs"] == 16
    manifest = json.loads((tmp_path / "run/LATEST/MANIFEST.json").read_text())
    assert manifest["progress"]["consumed_pairs"] == 8 * len([first, *others])
    saved = {path.name for path in (tmp_path / "run/LATEST").iterdir()}
    assert "model" in saved and "reference" not in saved


def test_the_guide_quotes_the_example_and_commands_that_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    blocks = dict.fromkeys(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL))
    assert len(blocks) == 7
    files = [
        EXAMPLE / "lookahead.py",
        EXAMPLE / "rpo.py",
        ROOT / "tests/support/runs/training_parts.py",
    ]
    files.append(ROOT / "recipes/preference.py")
    sources = "".join(path.read_text() for path in files)
    assert all(block.rstrip("\n") in sources for block in blocks)
    commands = [
        line
        for block in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
        for line in block.splitlines()
    ]
    for words in (shlex.split(command) for command in commands if command.startswith("ckpt-train")):
        assert main([*words[1:], "--print-config"]) == 0


def test_the_guides_methods_are_those_of_the_recipe() -> None:
    of_recipe = GUIDE.index("| of the recipe |")
    of_loop = GUIDE.index("| of the loop |")
    recipe_names = first_column(GUIDE[of_recipe:of_loop])
    assert len(recipe_names) > 10
    assert [name for name in recipe_names if not hasattr(LLMFinetune, name)] == []
    loop_names = first_column(GUIDE[of_loop : GUIDE.index("## Another loss")])
    assert len(loop_names) > 5
    assert [
        name for name in loop_names if not callable(getattr(LLMFinetune.loop_class, name, None))
    ] == []


def first_column(table: str) -> list[str]:
    rows = [row for row in table.splitlines() if row.startswith("|")]
    return re.findall(r"`(\w+)[`(]", "\n".join(row.split("|")[1] for row in rows))
