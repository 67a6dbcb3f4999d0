"""Arrays of zarr: those that the real megatron-core 0.9 wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.checkpoint.tensors.float_cast import cast
from automodel_ckpt.checkpoint.tensors.stored import whole
from automodel_ckpt.cli import ckpt
from automodel_ckpt.convert.names.megatron_names import plain_names
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.errors import CheckpointUnusable

FIXTURE = Path(__file__).parents[3] / "fixtures" / "megatron" / "zarr"
CHECKPOINT = "iter_0000020"
Capture = pytest.CaptureFixture[str]


def test_the_arrays_of_megatron_core_are_read_without_a_library() -> None:
    source = open_source(FIXTURE)
    expected = json.loads((FIXTURE / "expected" / "values.json").read_text())
    found = plain_names(source.tensors, "here")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        values = cast(whole(source.root, tensor), tensor.dtype, "F32")
        assert np.array_equal(values, np.array(expected[name], np.float32)), name
    assert {tensor.dtype for tensor in found.values()} == {"BF16", "F32"}
    assert source.omitted == ()


def test_a_checkpoint_with_the_older_backend_is_imported_and_shown(
    tmp_path: Path, capsys: Capture
) -> None:
    run = tmp_path / "run"
    assert ckpt.main(["show", str(FIXTURE)]) == 0
    assert "decoder.layers.mlp.linear_fc1.weight" in capsys.readouterr().out
    arguments = ["import", str(FIXTURE), str(run), "--config", str(FIXTURE / "expected")]
    assert ckpt.main(arguments) == 0
    # The step is the iteration in common.pt.
    (file,) = (run / "epoch_0_step_20" / "model").glob("*.safetensors")
    imported = load_file(file)
    expected = json.loads((FIXTURE / "expected" / "values.json").read_text())
    embedding = torch.tensor(expected["embedding.word_embeddings.weight"])[:9]
    assert torch.equal(imported["model.embed_tokens.weight"].float(), embedding)
    fused = torch.tensor(expected["decoder.layers.1.self_attention.linear_qkv.weight"])
    grouped = fused.reshape(2, 4, 2, 8)
    key = imported["model.layers.1.self_attn.k_proj.weight"].float()
    assert torch.equal(key, grouped[:, 2].reshape(4, 8))


def raw_array(directory: Path, shape: tuple[int, ...], chunks: tuple[int, ...]) -> np.ndarray:
    """Write an uncompressed array whose last chunks are padded; returns its values."""
    values = np.arange(np.prod(shape), dtype="<f4").reshape(shape)
    directory.mkdir(parents=True)
    description = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": chunks,
        "dtype": "<f4",
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
    }
    (directory / ".zarray").write_text(json.dumps(description))
    grid = [range(-(-extent // size)) for extent, size in zip(shape, chunks, strict=True)]
    for index in np.ndindex(*[len(numbers) for numbers in grid]):
        chunk = np.full(chunks, -1, dtype="<f4")
        region = tuple(
            slice(at * size, min((at + 1) * size, extent))
            for at, size, extent in zip(index, chunks, shape, strict=True)
        )
        part = values[region]
        chunk[tuple(slice(0, extent) for extent in part.shape)] = part
        (directory / (".".join(map(str, index)) or "0")).write_bytes(chunk.tobytes())
    return values


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((5, 3), (2, 3)), ((4, 5), (2, 2)), ((3, 4, 5), (2, 3, 2)), ((), ()), ((7,), (3,))],
)
def test_padding_of_the_last_chunks_is_not_read(
    shape: tuple[int, ...], chunks: tuple[int, ...], tmp_path: Path
) -> None:
    expected = raw_array(tmp_path / "arrays" / "w", shape, chunks)
    shutil.copy(FIXTURE / CHECKPOINT / "metadata.json", tmp_path / "arrays")
    source = open_source(tmp_path / "arrays")
    assert np.array_equal(np.array(whole(source.root, source.tensors["w"])), expected)


def test_links_missing_and_cut_chunks_are_errors(tmp_path: Path) -> None:
    run = shutil.copytree(FIXTURE, tmp_path / "run")
    chunk = run / CHECKPOINT / "decoder.final_layernorm.weight" / "0"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1])
    with pytest.raises(CheckpointUnusable, match="wrong size"):
        open_source(run)
    chunk.unlink()
    with pytest.raises(CheckpointUnusable, match="missing"):
        open_source(run)
    (tmp_path / "outside").write_bytes(content)
    chunk.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointUnusable, match="not a regular file"):
        open_source(run)
