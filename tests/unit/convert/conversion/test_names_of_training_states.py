"""``ckpt import --names --training-state``: the weights get other names, and the optimizer does not."""

import json
from pathlib import Path

import pytest

from automodel_ckpt.cli.ckpt import main

FIXTURES = Path(__file__).parents[3] / "fixtures"
NESTED = FIXTURES / "fsdp" / "torch-nested"
TRAINER = FIXTURES / "trainer" / "checkpoint-5"
FIRST, SECOND = (f"model.layers.{number}.self_attn.q_proj.weight" for number in range(2))


@pytest.mark.parametrize(
    ("source", "names"),
    [(NESTED, {"model.embed_tokens.weight": "table"}), (TRAINER, {FIRST: SECOND, SECOND: FIRST})],
    ids=["former names", "exchanged names"],
)
def test_an_optimizer_under_other_names_than_the_weights_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path, names: dict[str, str]
) -> None:
    file = tmp_path / "names.json"
    file.write_text(json.dumps(names))
    command = ["import", str(source), str(tmp_path / "run"), "--names", str(file)]
    assert main([*command, "--training-state"]) == 2
    assert "the weights get other names" in capsys.readouterr().err
    assert main([*command, "--dry-run"]) == 0
