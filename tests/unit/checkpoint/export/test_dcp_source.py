"""Directories of plain PyTorch DCP: exported without torch, bit for bit what torch's own reader gives."""

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from automodel_ckpt.cli.ckpt import main
from tests.support import ranks
from tests.support.external_tensors import error_of
from tests.support.models import tiny
from tests.support.models.shards import bits

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATS_OF_8_BITS = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
DTYPES = (torch.bool, *INTEGERS, *UNSIGNED, *FLOATS, *FLOATS_OF_8_BITS)


def save(directory: Path, state: dict[str, Any]) -> Path:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=directory, no_dist=not dist.is_initialized())
    finally:
        logging.disable(logging.NOTSET)
    return directory


def export(directory: Path) -> dict[str, torch.Tensor]:
    output = directory.parent / "out"
    assert main(["export", str(directory), "-o", str(output)]) == 0
    return {fqn: t for file in output.glob("*.safetensors") for fqn, t in load_file(file).items()}


def weights() -> dict[str, torch.Tensor]:
    """One tensor of each dtype and odd shape, views and all."""
    base = torch.arange(24.0)
    found = {f"d.{dtype}": base[:6].to(dtype).reshape(2, 3) for dtype in DTYPES}
    return found | {
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "view": base[3:9],
        "row": base.reshape(4, 6)[1:3],
        "parameter": torch.nn.Parameter(base.reshape(2, 3, 4)),
        "ünï/code \x1b": base[:1].clone(),
    }


def assert_same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for fqn, tensor in want.items():
        assert found[fqn].dtype == tensor.dtype and found[fqn].shape == tensor.shape, fqn
        assert bits(found[fqn]).tobytes() == bits(tensor.detach()).tobytes(), fqn


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_every_dtype_and_shape_comes_out_as_torch_saved_it(tmp_path: Path, nested: bool) -> None:
    state: dict[str, Any] = dict(weights())
    if nested:
        optimizer = {
            "state": {"view": {"exp_avg": torch.ones(6), "step": 5}},
            "param_groups": [{"lr": 0.1}],
        }
        state = {"model": state, "optimizer": optimizer, "epoch": 3}
    assert_same(export(save(tmp_path / "dcp", state)), weights())


def test_a_layout_of_two_ranks_with_both_dimensions_cut_is_put_together(tmp_path: Path) -> None:
    def on_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(35, dtype=torch.float32).reshape(5, 7)
        cuts: dict[str, Any] = {"rows": [Shard(0)], "columns": [Shard(1)], "all": [Replicate()]}
        state = {
            name: distribute_tensor(whole.clone(), mesh, places) for name, places in cuts.items()
        }
        save(
            tmp_path / "dcp", state | {"one": distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])}
        )

    ranks.run(on_rank, 2)
    whole = torch.arange(35, dtype=torch.float32).reshape(5, 7)
    want = {"rows": whole, "columns": whole, "all": whole, "one": torch.ones(1, 3)}
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    assert_same(export(tmp_path / "dcp"), want)


def test_our_own_dcp_model_exports_the_same_when_its_manifest_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiny.recipe()
    checkpoint = tiny.save(
        tmp_path, made, model_save_format="torch_save", save_consolidated=False
    ).path
    (checkpoint / "MANIFEST.json").unlink()
    assert main(["export", str(checkpoint / "model"), "-o", str(tmp_path / "out")]) == 0
    assert "unchecked" in capsys.readouterr().err
    found = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert_same(found, {fqn: t for fqn, t in made.model.state_dict().items() if fqn != "head"})


def test_it_needs_no_torch(tmp_path: Path) -> None:
    save(tmp_path / "dcp", weights())
    code = "import sys; sys.modules['torch'] = None; from automodel_ckpt.cli.ckpt import main; sys.exit(main())"
    arguments = ["consolidate", str(tmp_path / "dcp"), "-o", str(tmp_path / "out")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    assert (tmp_path / "out" / "model-00001-of-00001.safetensors").is_file()


def test_nothing_but_optimizer_state_or_values_is_no_model(tmp_path: Path) -> None:
    assert "no tensors" in error_of(save(tmp_path / "dcp", {"step": 5}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: (file.rename(file.parent.parent / "x"), file.symlink_to("../x")), "link"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "not a regular file"),
    ],
)
def test_a_file_of_dcp_that_is_a_link_or_a_pipe_is_rejected(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    directory = save(tmp_path / "dcp", {"model": weights()})
    spoil(next(directory.glob("*.distcp")))
    assert message in error_of(directory)
