"""`ckpt show` tells what a checkpoint holds and, on request, what its tensors' values are like."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.checkpoint.parts import slices
from automodel_ckpt.checkpoint.parts.manifest import tiling_fault
from automodel_ckpt.checkpoint.parts.slices import Slice, Tensor
from automodel_ckpt.checkpoint.tensors import box_reader
from automodel_ckpt.checkpoint.tensors.statistics import statistics_of
from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models import tiny
from tests.support.models.shards import checkpoint_in, cut, write_checkpoint

Capture = pytest.CaptureFixture[str]


def shown(capsys: Capture, *arguments: str) -> Any:
    assert main(["show", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def expected(tensor: torch.Tensor) -> dict[str, float | None]:
    wide = tensor.to(torch.float64).flatten()
    finite = wide[wide.isfinite()]
    values = {
        "min": finite.min(),
        "max": finite.max(),
        "mean": finite.mean(),
        "std": finite.std(unbiased=False),
        "norm": finite.norm(),
        "num_nan": wide.isnan().sum(),
        "num_inf": wide.isinf().sum(),
        "num_zero": (wide == 0).sum(),
    }
    return {name: value.item() for name, value in values.items()} | {"numel": tensor.numel()}


@pytest.mark.parametrize(("num_ranks", "dim"), [(1, 0), (3, 1)])
def test_statistics_of_every_dtype_are_those_that_torch_computes(
    tmp_path: Path, capsys: Capture, num_ranks: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "_BLOCK_ELEMENTS", 7)
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(3)) * 3 + 1
    values[1, 2:4] = 0
    tensors = {
        str(dtype): values.to(dtype)
        for dtype in (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int8,
            torch.int64,
            torch.bool,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
    }
    tensors["odd"] = values.clone()
    tensors["odd"].view(-1)[[3, 7, 11]] = torch.tensor([math.nan, math.inf, -math.inf])
    tensors["scalar"] = torch.tensor(-2.5)
    path = tmp_path / "c"
    write_checkpoint(
        path, tensors, [p for f, t in tensors.items() for p in cut(f, t, num_ranks, dim)]
    )
    found = shown(capsys, str(path), "--stats")["trees"]["model"]["tensors"]
    for name, tensor in tensors.items():
        assert found[name]["statistics"] == pytest.approx(expected(tensor), rel=1e-12, abs=1e-14), (
            name
        )


def test_what_has_no_values_or_no_order_has_no_statistics(tmp_path: Path, capsys: Capture) -> None:
    tensors = {
        "empty": torch.empty(0, 3),
        "nan": torch.full((2,), math.nan),
        "complex": torch.ones(2) * 1j,
    }
    write_checkpoint(tmp_path / "c", tensors, [p for f, t in tensors.items() for p in cut(f, t, 1)])
    found = shown(capsys, str(tmp_path / "c"), "--stats")["trees"]["model"]["tensors"]
    for name, counts in {"empty": (0, 0), "nan": (2, 2), "complex": (0, 2)}.items():
        values = found[name]["statistics"]
        assert (values["min"], values["mean"], values["norm"]) == (None, None, None)
        assert (values["num_nan"], values["numel"]) == counts
    assert main(["show", str(tmp_path / "c"), "--stats"]) == 0
    assert "NaN" in capsys.readouterr().out


def test_a_mean_far_from_zero_costs_no_digits(tmp_path: Path, capsys: Capture) -> None:
    # Several boxes.
    values = torch.randn(600_000, dtype=torch.float64) + 1e9
    write_checkpoint(tmp_path / "c", {"w": values}, cut("w", values, 1))
    found = shown(capsys, str(tmp_path / "c"), "--stats")["trees"]["model"]["tensors"]["w"][
        "statistics"
    ]
    assert found["std"] == pytest.approx(values.std(unbiased=False).item(), rel=1e-7)


@pytest.mark.parametrize(
    "layout", [{}, {"model_save_format": "torch_save"}, {"model_layout": "hf"}], ids=str
)
def test_statistics_parameter_groups_and_position_of_a_training_checkpoint(
    tmp_path: Path, capsys: Capture, layout: Any
) -> None:
    recipe = tiny.recipe(dataloader=tiny.Counter({"consumed_samples": 160}))
    tiny.train(recipe)
    path = tiny.save(tmp_path, recipe, save_consolidated=False, **layout).path
    document = shown(capsys, str(path), "--stats")
    for name, value in recipe.model.state_dict().items():
        stored = document["trees"]["model"]["tensors"].get(name)
        if stored is not None and value.numel() and value.dtype != torch.bool:
            assert stored["statistics"]["norm"] == pytest.approx(
                value.double().norm().item(), rel=1e-9, abs=1e-12
            )
    (group, *_) = document["trees"]["optimizer"]["groups"]
    assert group["lr"] == recipe.optimizer.param_groups[0]["lr"]
    assert group["params"] == len(recipe.optimizer.param_groups[0]["params"])
    assert document["data_position"] == {"value": {"consumed_samples": 160}}
    assert main(["show", str(path)]) == 0
    text = capsys.readouterr().out
    assert (
        f"{group['params']} parameters: lr" in text
        and "data position" in text
        and "\x1b" not in text
    )


def test_statistics_of_a_damaged_checkpoint_are_refused(tmp_path: Path, capsys: Capture) -> None:
    path = checkpoint_in(tmp_path, 20)
    shard = next((path / "model").glob("shard-00001*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["show", str(path)]) == 0
    assert main(["show", str(path), "--stats"]) == 3
    assert "another size" in capsys.readouterr().err


def test_a_tensor_whose_file_went_meanwhile_is_named(tmp_path: Path) -> None:
    piece = Slice("w", "F32", (0,), (2,), "gone", 0, 8)
    with pytest.raises(CheckpointUnusable, match="'w' cannot be read"):
        statistics_of(tmp_path, Tensor("w", "F32", (2,), (piece,)))


def test_tensors_whose_names_differ_in_numbers_share_a_line(
    tmp_path: Path, capsys: Capture
) -> None:
    shapes = {"model.layers.{}.q.weight": (2, 3), "model.layers.{}.norm": (3,)}
    tensors = {
        name.format(n): torch.ones(shape) for n in range(12) for name, shape in shapes.items()
    }
    tensors |= {f"experts.{n}.up": torch.ones(2) for n in (0, 2, 5)} | {
        "head": torch.ones(4, dtype=torch.bfloat16)
    }
    tensors["model.layers.7.norm"] = torch.ones(5)
    write_checkpoint(tmp_path / "c", tensors, [p for f, t in tensors.items() for p in cut(f, t, 1)])
    assert main(["show", str(tmp_path / "c")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model.layers.*.q.weight", "F32", "[2,", "3]", "12", "tensors"] in lines
    assert ["model.layers.*.norm", "F32", "[3]", "11", "tensors"] in lines
    assert ["model.layers.7.norm", "F32", "[5]"] in lines and ["head", "BF16", "[4]"] in lines
    assert ["experts.*.up", "F32", "[2]", "3", "tensors"] in lines
    assert main(["show", str(tmp_path / "c"), "--tensors"]) == 0
    assert "model.layers.11.q.weight" in capsys.readouterr().out


def test_slices_whose_rows_stand_apart_are_read_where_they_are(tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    (tmp_path / "w").write_bytes(b"head" + values.numpy().tobytes())
    halves = [Slice("w", "F32", (0, at), (3, 2), "w", 4 + 4 * at, 24, None, True) for at in (0, 2)]
    reader = box_reader.BoxReader(tmp_path, Tensor("w", "F32", (3, 4), tuple(halves)))
    read = [reader.wide(reader.read(box)) for box in slices.boxes((3, 4))]
    assert (read[0] == values.numpy()).all() and len(read) == 1


@pytest.mark.parametrize(
    "shape", [(), (0, 3), (7,), (3, 5, 2), (1000, 700), (3, 300_000), (2, 600_000, 1)]
)
def test_boxes_make_up_the_tensor(shape: tuple[int, ...]) -> None:
    found = list(slices.boxes(shape))
    assert tiling_fault(found, shape) is None and all(box.numel <= 256 << 10 for box in found)
