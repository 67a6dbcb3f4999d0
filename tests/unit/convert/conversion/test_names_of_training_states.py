"""``ckpt import --names --training-state``: the optimizer gets the names of its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from automodel_ckpt.checkpoint.parts.manifest import Manifest
from automodel_ckpt.cli.ckpt import main

FIXTURES = Path(__file__).parents[3] / "fixtures"
NESTED = FIXTURES / "fsdp" / "torch-nested"
TRAINER = FIXTURES / "trainer" / "checkpoint-5"
Capture = pytest.CaptureFixture[str]
THERE = {
    "model.layers.{i}.self_attn.q_proj.weight": "blocks.{i}.wq",
    "model.layers.{i}.self_attn.k_proj.weight": "blocks.{i}.wk",
    "model.embed_tokens.weight": "table",
    "model.norm.weight": "norm",
}


def imported(source: Path, run: Path, names: dict[str, str], *more: str) -> Manifest:
    file = run.with_suffix(".json")
    file.write_text(json.dumps(names))
    command = ["import", str(source), str(run), "--training-state", "--names", str(file), *more]
    assert main(command) == 0
    (checkpoint,) = run.glob("epoch_*")
    return Manifest.read(checkpoint)


def digests(manifest: Manifest) -> dict[str, str | None]:
    """Return the digest of each tensor, of the optimizer, too."""
    found: dict[str, str | None] = {}
    for tree in manifest.trees.values():
        for name, tensor in tree.tensors.items():
            found[name] = tensor.slices[0].digest
    return found


def plain_import(source: Path, run: Path) -> dict[str, str | None]:
    assert main(["import", str(source), str(run), "--training-state"]) == 0
    (checkpoint,) = run.glob("epoch_*")
    return digests(Manifest.read(checkpoint))


def test_moments_get_the_names_of_their_weights(tmp_path: Path) -> None:
    direct = plain_import(NESTED, tmp_path / "direct")
    there = imported(NESTED, tmp_path / "there", THERE)
    found = digests(there)
    moments = [name for name in found if name.endswith("exp_avg")]
    assert len(moments) == 3 and "optimizer.state.model.table.exp_avg" in moments
    (checkpoint,) = (tmp_path / "there").glob("epoch_*")
    exported = tmp_path / "dcp"
    command = ["export", str(checkpoint), "--to", "dcp", "--optimizer", "nested"]
    assert main([*command, "-o", str(exported)]) == 0
    back = {new: old for old, new in THERE.items()}
    found = digests(imported(exported, tmp_path / "back", back, "--config", str(NESTED)))
    assert {name: found[name] for name in direct} == direct
    # The directory names the output layer, which is the embedding, too.
    assert found.keys() - direct.keys() <= {"lm_head.weight"}


def test_parameters_that_are_left_out_have_no_state(tmp_path: Path, capsys: Capture) -> None:
    manifest = imported(NESTED, tmp_path / "run", {"model.norm.weight": ""})
    assert "1 tensor that run.json leaves out" in capsys.readouterr().out
    assert not any("model.norm.weight" in name for name in digests(manifest))
    assert "1 tensor that run.json leaves out" in manifest.lineage["not_transferred"]


def test_a_file_that_exchanges_names_is_an_error(tmp_path: Path, capsys: Capture) -> None:
    first, second = (f"model.layers.{number}.self_attn.q_proj.weight" for number in range(2))
    names = tmp_path / "names.json"
    names.write_text(json.dumps({first: second, second: first}))
    command = ["import", str(TRAINER), str(tmp_path / "run"), "--training-state"]
    assert main([*command, "--names", str(names)]) == 2
    assert "it exchanges names" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
