"""`ckpt diff` shows what changed, and reads only what it has to."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from automodel_ckpt.cli.ckpt import main
from tests.support.models.shards import cut, write_checkpoint

Capture = pytest.CaptureFixture[str]


def checkpoint(
    path: Path, tensors: dict[str, torch.Tensor], num_ranks: int = 2, dim: int = 0
) -> Path:
    write_checkpoint(
        path, tensors, [p for f, t in tensors.items() for p in cut(f, t, num_ranks, dim)]
    )
    return path


def shown(capsys: Capture, one: Path | str, other: Path) -> Any:
    assert main(["diff", str(one), str(other), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "same": torch.randn(5, 4, generator=generator),
        "moved": torch.randn(6, 4, generator=generator),
        "brief": torch.randn(4, 2, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "tiny": torch.zeros(3).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 2),
    }


@pytest.mark.parametrize(("num_ranks", "dim"), [(2, 0), (3, 1)], ids=["same cuts", "other cuts"])
def test_changes_are_measured_whatever_the_cuts(
    tmp_path: Path, capsys: Capture, num_ranks: int, dim: int
) -> None:
    before, after = weights(), weights()
    after["moved"][2, 1] += 0.5
    after["brief"] = after["brief"] * 2
    after["count"] += 3
    after["tiny"][1] = 1.0
    tree = shown(
        capsys,
        checkpoint(tmp_path / "a", before),
        checkpoint(tmp_path / "b", after, num_ranks, dim),
    )["trees"]
    model = tree["model"]
    changes = {change["fqn"]: change for change in model["changed"]}
    assert changes.keys() == {"moved", "brief", "count", "tiny"}
    want = 0.5 / before["moved"].double().norm().item()
    assert changes["moved"]["max_abs"] == pytest.approx(0.5) and changes["moved"][
        "relative"
    ] == pytest.approx(want, 1e-6)
    assert changes["moved"]["num_changed"] == 1 and changes["moved"]["numel"] == 24
    assert changes["brief"]["relative"] == pytest.approx(1.0) and changes["count"]["max_abs"] == 3
    assert changes["tiny"]["max_abs"] is None and changes["tiny"]["num_changed"] == 1
    assert model["num_equal"] == 3 and (model["num_unread"] == 3) is (dim == 0)


def test_digests_show_what_is_equal(tmp_path: Path, capsys: Capture) -> None:
    one = checkpoint(tmp_path / "a", weights())
    shutil.copytree(one, tmp_path / "b")
    assert main(["diff", str(one), str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert (
        "7 equal (7 by digest), 0 changed" in text
        and "no difference" in text
        and "\x1b" not in text
    )


@pytest.mark.parametrize("time_of_change", ["after the manifest", "before it, in an export"])
def test_digests_of_changed_files_are_compared_with_their_bytes(
    tmp_path: Path, capsys: Capture, time_of_change: str
) -> None:
    one = checkpoint(tmp_path / "a", weights())
    is_export = "export" in time_of_change
    if is_export:
        assert main(["export", str(one), "--output", str(tmp_path / "export")]) == 0
        one = tmp_path / "export"
    shutil.copytree(one, tmp_path / "b")
    edited = min((tmp_path / "b").rglob("*.safetensors"))
    before = edited.stat()
    content = bytearray(edited.read_bytes())
    content[-1] ^= 1
    edited.write_bytes(content)
    change = -1e9 if is_export else 1e9
    os.utime(edited, ns=(before.st_atime_ns, before.st_mtime_ns + int(change)))
    capsys.readouterr()
    assert main(["diff", str(one), str(tmp_path / "b")]) == 3
    shown = capsys.readouterr()
    assert "1 damaged" in shown.out and "digest" in shown.err
    assert edited.name in shown.err


def test_another_programs_files_are_compared_and_marked(tmp_path: Path, capsys: Capture) -> None:
    tensors = {name: tensor for name, tensor in weights().items() if name != "empty"}
    (tmp_path / "hf").mkdir()
    save_file(
        tensors | {"moved": tensors["moved"] + 1},
        tmp_path / "hf" / "model.safetensors",
        {"format": "pt"},
    )
    document = shown(capsys, checkpoint(tmp_path / "a", tensors), tmp_path / "hf")
    assert document["foreign"] == [str(tmp_path / "hf")]
    assert [change["fqn"] for change in document["trees"]["model"]["changed"]] == ["moved"]
    shutil.copytree(tmp_path / "hf", tmp_path / "described")
    (tmp_path / "described" / "config.json").write_text('{"model_type": "llama"}')
    assert main(["diff", str(tmp_path / "hf"), str(tmp_path / "described")]) == 0
    assert "not compared: only one of the two has this information" in capsys.readouterr().out


def test_values_in_a_store_are_not_compared_with_files_that_have_no_digests(
    tmp_path: Path, capsys: Capture
) -> None:
    tensors = {"w": torch.ones(3)}
    one = checkpoint(tmp_path / "epoch_0_step_1", tensors, 1)
    assert main(["push", str(one), f"file://{tmp_path}/store"]) == 0
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    document = shown(capsys, f"file://{tmp_path}/store/{one.name}", tmp_path / "hf")
    assert document["trees"]["model"]["undecided"] == ["w"]
    assert document["trees"]["model"]["differing"] == []
