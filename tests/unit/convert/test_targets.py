"""What every target of ``ckpt export`` guarantees: damage is reported, and nothing is written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from automodel_ckpt.cli.ckpt import main
from automodel_ckpt.cli.commands.export import _ALL
from tests.support.llamas import llama_checkpoint

OPTIONS = {
    "compressed-tensors": ["--scheme", "W8A8"],
    "nemo": ["--prefix", "model."],
}
LIBRARIES = {
    "compressed-tensors": "compressed_tensors",
    "gguf": "gguf",
    "onnx": "onnxscript",
    "zarr": "tensorstore",
}


# The Trainer's directory needs optimizer state, which this checkpoint does not have.
TARGETS = [target.name for target in _ALL if target.name != "trainer"]


@pytest.mark.parametrize("target", TARGETS)
def test_no_target_writes_a_damaged_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    library = LIBRARIES.get(target)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    checkpoint = tmp_path / "source" / "epoch_0_step_4"
    llama_checkpoint(checkpoint, dtype=torch.float32)
    shard = next((checkpoint / "model").glob("shard-00002*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    out = tmp_path / "out"
    out.mkdir()
    arguments = [str(checkpoint), "--to", target, "-o", str(out / "x")]
    code = main(["export", *arguments, *OPTIONS.get(target, [])])
    said = capsys.readouterr().err
    assert code == 3, said
    assert shard.name in said or "digest" in said, said
    assert list(out.iterdir()) == []
