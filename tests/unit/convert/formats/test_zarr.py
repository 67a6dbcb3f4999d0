"""Arrays of zarr: those that the real megatron-core 0.9 wrote."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.cli import ckpt
from tests.support.external_tensors import described, error_of, values

FIXTURE = Path(__file__).parents[3] / "fixtures" / "megatron" / "zarr"
CHECKPOINT = "iter_0000020"
Capture = pytest.CaptureFixture[str]


def test_the_arrays_of_megatron_core_are_read_without_a_library() -> None:
    expected = json.loads((FIXTURE / "expected" / "values.json").read_text())
    found = {}
    for name, tensor in values(FIXTURE).items():
        # All layers are in one array.
        start, layers, rest = name.partition("decoder.layers.")
        for number, layer in enumerate(tensor) if layers else ():
            found[f"{start}{layers}{number}.{rest}"] = layer
        if not layers:
            found[name] = tensor
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), torch.tensor(expected[name])), name
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.float32}
    assert described(FIXTURE).omitted == ()


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
    assert np.array_equal(values(tmp_path / "arrays")["w"].numpy(), expected)


def test_links_missing_and_cut_chunks_are_errors(tmp_path: Path) -> None:
    run = shutil.copytree(FIXTURE, tmp_path / "run")
    chunk = run / CHECKPOINT / "decoder.final_layernorm.weight" / "0"
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-1])
    assert "wrong size" in error_of(run)
    chunk.unlink()
    assert "missing" in error_of(run)
    (tmp_path / "outside").write_bytes(content)
    chunk.symlink_to(tmp_path / "outside")
    assert "not a regular file" in error_of(run)
