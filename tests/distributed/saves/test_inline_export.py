"""Exports of a run: byte for byte what consolidate.sh makes of the same checkpoint."""

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from automodel_ckpt.checkpoint import HFAssets, SaveReport
from automodel_ckpt.cli.ckpt import main
from tests.distributed.saves.test_hf_layout import make_base
from tests.support import ranks
from tests.support.checkpoints import is_intact
from tests.support.models import tiny
from tests.support.runs.training import train, write_recipe


def in_columns(model: torch.nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 2:
                module.register_parameter(
                    name, torch.nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(1)]))
                )


def by_rows(model: torch.nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (by_rows, {}),
    "columns": (in_columns, {}),
    "torch_save": (by_rows, {"model_save_format": "torch_save"}),
}


def made_of(base: Path) -> tuple[torch.nn.Module, HFAssets]:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").mul_(1.0001)
    return model, HFAssets.from_model(model, base_dir=base)


def export_all(base: Path, root: Path) -> list[SaveReport]:
    reports = []
    for name, (shard, options) in CASES.items():
        model, assets = made_of(base)
        shard(model)
        state = SimpleNamespace(model=model)
        reports.append(
            tiny.save(
                root / name, state, save_consolidated="every", assets={"model": assets}, **options
            )
        )
    return reports


def contents(directory: Path) -> dict[str, bytes]:
    files = {
        p.relative_to(directory).as_posix(): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file()
    }
    assert files.pop("export_manifest.json")
    return files


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.further)])
def test_it_is_byte_for_byte_what_consolidation_makes_of_the_shards(
    tmp_path: Path, tied: bool
) -> None:
    make_base(tmp_path / "base", tied=tied)
    # One tensor of the base is wider than the others.
    file = next(
        p for p in (tmp_path / "base").glob("*.safetensors") if "model.norm.weight" in load_file(p)
    )
    wide = {n: t.float() if n == "model.norm.weight" else t for n, t in load_file(file).items()}
    save_file(wide, file, {"format": "pt"})
    for reports in ranks.run(export_all, 2, tmp_path / "base", tmp_path):
        assert [(report.export_failure, report.export is None) for report in reports] == [
            (None, False)
        ] * len(CASES)
    for name in CASES:
        checkpoint = tmp_path / name / "epoch_0_step_20"
        again = tmp_path / f"again_{name}"
        assert main(["consolidate", str(checkpoint), "--output", str(again)]) == 0
        inline, later = contents(checkpoint / "model/consolidated"), contents(again)
        assert inline.keys() == later.keys() and len(inline) > 4
        assert [file for file in inline if inline[file] != later[file]] == []
        assert is_intact(checkpoint) and is_intact(checkpoint, deep=True)
        assert sorted(p.name for p in (checkpoint / "model").glob(".consol*")) == []
    dtypes = {
        n: t.dtype
        for p in (checkpoint / "model/consolidated").glob("*.safetensors")
        for n, t in load_file(p).items()
    }
    assert {dtypes.pop("model.norm.weight"), *dtypes.values()} == {torch.float32, torch.bfloat16}


def test_what_a_killed_export_left_goes_at_the_next_start_which_makes_the_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    arguments = (
        f"--checkpoint.checkpoint_dir={run}",
        "--checkpoint.save_consolidated=every",
        "--step_scheduler.ckpt_every_steps=2",
        "--step_scheduler.max_steps",
    )
    ranks.run(partial(train, recipe, *arguments, "4"), 1, init=False)
    newest, older = (next(run.glob(f"*_step_{step}")) / "model" for step in (4, 2))
    whole = contents(newest / "consolidated")
    staging = newest / f".consolidated.staging-{'0' * 32}"
    (newest / "consolidated").rename(staging)
    (staging / "export_manifest.json").unlink()
    shutil.copytree(older / "consolidated", older / f".consolidated.previous-{'1' * 32}")
    assert main(["verify", "--deep", str(run)]) == 0
    capsys.readouterr()
    assert main(["ls", str(run), "--json"]) == 0
    assert all(
        row["complete"] and not row["damaged"] for row in json.loads(capsys.readouterr().out)
    )
    ranks.run(partial(train, recipe, *arguments, "6"), 1, init=False)
    assert [*run.glob("*/model/.consolidated*")] == []
    again = contents(newest / "consolidated")
    assert {name: data for name, data in again.items() if name != "export_manifest.json"} == {
        name: data for name, data in whole.items() if name != "export_manifest.json"
    }
    assert (next(run.glob("*_step_6")) / "model" / "consolidated").is_dir()
