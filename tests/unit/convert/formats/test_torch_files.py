"""Weights in files of torch.save are described as slices: no code of theirs runs, and no tensor is copied."""

import argparse
import json
import re
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from automodel_ckpt.cli import ckpt
from tests.support.checkpoints import is_intact
from tests.support.external_tensors import described, error_of, values


def state_dict() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed.weight": torch.randn(7, 4, generator=generator),
        "layers.0.weight": torch.randn(4, 4, generator=generator).bfloat16(),
        "layers.0.steps": torch.tensor(3),
        "empty": torch.empty(0, 4),
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape and torch.equal(found[name], value), name


def write(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_state_dict_is_read_in_every_pickle_protocol(tmp_path: Path, protocol: int) -> None:
    path = write(tmp_path / "m.pt", OrderedDict(state_dict()), pickle_protocol=protocol)
    assert_equal(values(path), state_dict())


@pytest.mark.parametrize(
    "key", ["state_dict", "model_state_dict", "model", "module", "model_state"]
)
def test_a_training_state_gives_its_model(tmp_path: Path, key: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    saved = {
        "epoch": 3,
        "optimizer": optimizer.state_dict(),
        key: state_dict(),
        "args": argparse.Namespace(path=Path("x")),
        "metrics": defaultdict(list, loss=[1.0]),
        "names": {"a", "b"},
    }
    path = write(tmp_path / "state.pt", saved)
    assert_equal(values(path), state_dict())
    others, rest = described(path).omitted
    assert others.startswith("6 tensors") and rest.startswith("5 values")


def test_the_state_of_an_optimizer_is_never_a_part_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    names = {f"layer.{name}": value for name, value in model.state_dict().items()}
    saved = {
        "policy": names,
        "ema": {**names},
        "opt": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }
    found = described(write(tmp_path / "two.pt", saved))
    expected = {f"{key}.{name}" for key in ("policy", "ema") for name in names}
    assert found.tensors.keys() == {*expected, "rng"}
    path = write(tmp_path / "one.pt", {**saved, "net": names})
    assert described(path).tensors.keys() == names.keys()
    assert ckpt.main(["import", str(path), str(tmp_path / "run"), "--training-state"]) == 3
    assert "only the weights" in capsys.readouterr().err


def test_a_pickle_in_the_place_of_pytorchs_archive_is_an_error_with_a_command(
    tmp_path: Path,
) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(state_dict(), path, _use_new_zipfile_serialization=False)
    assert re.search(r"before PyTorch 1\.6[\s\S]*torch\.load", error_of(tmp_path))


def test_the_prefixes_of_wrappers_and_of_lightning_are_removed(tmp_path: Path) -> None:
    wrapped = {f"module._orig_mod.{name}": value for name, value in state_dict().items()}
    assert_equal(values(write(tmp_path / "ddp.pt", wrapped)), state_dict())
    lightning = {
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {f"net.{name}": value for name, value in state_dict().items()},
        "hyper_parameters": {"lr": 1.0},
        "loops": {"fit_loop": {"state_dict": {}}},
    }
    assert_equal(values(write(tmp_path / "last.ckpt", lightning)), state_dict())
    two_parts = {
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {"a.w": torch.ones(1), "b.w": torch.ones(1)},
    }
    assert values(write(tmp_path / "two.ckpt", two_parts)).keys() == {"a.w", "b.w"}


def test_views_parameters_and_nested_mappings_are_read(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    expected = {
        "columns": base[:, 2:5],
        "transposed": base.t()[:3],
        "rows": base[1:3],
        "expanded": base[0].expand(4, 10),
        "scalar": base[2, 3],
    }
    path = write(tmp_path / "views.pt", {**expected, "nested": {"w": nn.Parameter(base)}})
    assert_equal(values(path), {**expected, "nested.w": base})
    tensors = described(path).tensors
    assert all(len(tensor.slices) == 1 for tensor in tensors.values())
    strided = {name for name, tensor in tensors.items() if tensor.slices[0].strides is not None}
    assert strided == {"columns", "transposed", "expanded"}


def test_a_large_expanded_tensor_is_an_error_that_names_it(tmp_path: Path) -> None:
    text = error_of(write(tmp_path / "t.pt", {"big": torch.zeros(300).expand(300, 300)}))
    assert "'big'" in text
    assert "expanded" in text
    assert ".contiguous()" in text


def strided_tensors() -> dict[str, torch.Tensor]:
    """Tensors whose elements are not in row-major order in the file, one of them of several blocks."""
    generator = torch.Generator().manual_seed(2)
    large = torch.randn(700, 900, generator=generator)
    images = torch.randn(4, 3, 5, 6, generator=generator)
    return {
        "t": large.t(),
        "columns": large[:, 100:400].bfloat16().t()[::2],
        "conv": images.to(memory_format=torch.channels_last),
        "permuted": images.permute(2, 0, 3, 1)[1:],
        "one_row": torch.arange(6.0).as_strided((1, 3), (2**61, 2)),
        "plain": torch.arange(6.0),
    }


def test_strided_tensors_are_imported_exported_and_compared(tmp_path: Path) -> None:
    expected = strided_tensors()
    path = write(tmp_path / "m.pt", expected)
    assert_equal(values(path), expected)
    assert ckpt.main(["import", str(path), str(tmp_path / "run")]) == 0
    assert ckpt.main(["diff", str(path), str(tmp_path / "run")]) == 0
    assert ckpt.main(["verify", str(tmp_path / "run"), "--deep"]) == 0
    assert_equal(values(tmp_path / "run"), expected)
    assert ckpt.main(["export", str(path), "-o", str(tmp_path / "hf")]) == 0
    assert_equal(values(tmp_path / "hf"), expected)
    cast = ["--cast-dtype", "bf16", "-o", str(tmp_path / "bf16")]
    assert ckpt.main(["export", str(path), *cast]) == 0
    found = values(tmp_path / "bf16")
    assert_equal(found, {name: value.bfloat16() for name, value in expected.items()})
    copy = tmp_path / "copy.pt"
    assert ckpt.main(["export", str(path), "--to", "torch", "-o", str(copy)]) == 0
    assert_equal(torch.load(copy, weights_only=True), expected)
    assert ckpt.main(["show", str(path), "--stats", "--json"]) == 0


class OwnClass:
    def __init__(self) -> None:
        self.weight = torch.ones(2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []}, "state of an optimizer"),
        ({"module": {"w": torch.ones(1)}, "ds_version": "0.19"}, "DeepSpeed"),
        ({"model": {"w": torch.ones(1)}, "checkpoint_version": 3.0}, "Megatron-LM"),
        ([torch.ones(2)], "no model in this file"),
        (torch.ones(2), "no model in this file"),
        ({"step": 3}, "no tensors"),
        (argparse.Namespace(w=1), "class argparse.Namespace"),
        ({"w": OwnClass()}, "of a class that is not read"),
        ({(1, 2): torch.ones(1)}, "a name of its model is not text"),
        ({"a\ud800": torch.ones(1)}, "not printable"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, value: Any, message: str) -> None:
    assert message in error_of(write(tmp_path / "x.pt", value))


def pytorch_files(directory: Path, *, num_files: int) -> Path:
    directory.mkdir()
    weight_map = {}
    names = list(state_dict())
    for number in range(num_files):
        file = f"pytorch_model-{number + 1:05}-of-{num_files:05}.bin"
        chosen = names[number::num_files]
        write(directory / file, {name: state_dict()[name] for name in chosen})
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return directory


def test_a_directory_of_pytorch_files_is_read_by_its_index(tmp_path: Path) -> None:
    several = pytorch_files(tmp_path / "several", num_files=2)
    assert_equal(values(several), state_dict())
    assert described(several).tensors.keys() == state_dict().keys()
    single = tmp_path / "single"
    single.mkdir()
    write(single / "pytorch_model.bin", state_dict())
    assert_equal(values(single), state_dict())
    # A second model of accelerate's save_state is reported.
    write(single / "pytorch_model_1.bin", {"other": torch.ones(1)})
    assert described(single).omitted == ("pytorch_model_1.bin beside pytorch_model.bin",)
    missing = pytorch_files(tmp_path / "missing", num_files=2)
    write(missing / "pytorch_model-00001-of-00002.bin", {"other": torch.ones(1)})
    assert "not in its file" in error_of(missing)
    (missing / "pytorch_model-00001-of-00002.bin").unlink()
    assert "No such file" in error_of(missing)


def test_a_torch_file_is_imported_with_the_config_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    write(source / "epoch=3.ckpt", {"state_dict": state_dict(), "epoch": 3})
    arguments = ["import", "--json", str(source / "epoch=3.ckpt"), str(tmp_path / "run")]
    assert ckpt.main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "a file of torch.save" and document["has_config"]
    assert document["left_out"] == ["1 value that is not a tensor"]
    assert is_intact(tmp_path / "run")
    assert_equal(values(tmp_path / "run"), state_dict())


def test_a_file_of_another_kind_is_named_by_its_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(20))
    assert ckpt.main(["show", str(tmp_path / "m.h5")]) == 3
    assert "HDF5" in capsys.readouterr().err
