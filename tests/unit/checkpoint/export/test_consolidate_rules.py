"""The dtype rules of an export over random models: every dtype, shape and cut, every base, every cast."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from automodel_ckpt.checkpoint.files.dtypes import dtype_code
from automodel_ckpt.checkpoint.files.safetensors_header import read_header
from automodel_ckpt.checkpoint.parts.slices import Box
from automodel_ckpt.checkpoint.sources.source import (
    EXPECTED_TENSORS,
    FILE_INDEX_MAP,
    BaseMaps,
    read_maps,
)
from automodel_ckpt.errors import CheckpointUnusable
from tests.support.models.shards import Chunk, bits, write_checkpoint

ORDINARY = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
CASTS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]
OTHERS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.complex64]
SHAPES = [(), (0,), (3, 0, 2), (1,), (13,), (7, 5), (4, 1, 9), (2, 3, 4, 5), (130, 33)]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype in INTEGERS:
        return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    return (torch.randn(shape) * 10).to(dtype)


def grid(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """Cut unevenly along any of its dimensions, as FSDP, TP, and both in one or two dimensions do."""
    edges = []
    for extent in shape:
        inner = (
            chance.sample(range(1, extent), chance.randrange(min(4, extent))) if extent > 1 else []
        )
        edges.append(list(itertools.pairwise([0, *sorted(inner), extent])))
    found = [
        Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
        for ends in itertools.product(*edges)
    ]
    chance.shuffle(found)
    return found


def rule(saved: str, original: str | None, cast: str | None) -> str:
    """What an exported tensor's dtype has to be, said once more."""
    if saved not in ORDINARY:
        return saved
    if cast:
        return CASTS[cast]
    return original if original in ORDINARY else saved


@pytest.mark.parametrize("seed", range(8))
def test_every_tensor_gets_its_dtype_and_keeps_its_values(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    cast = chance.choice([None, None, *CASTS])
    dtypes = [
        *ORDINARY.values(),
        *chance.sample(INTEGERS, 4),
        *OTHERS,
        *chance.choices(list(ORDINARY.values()), k=4),
    ]
    tensors = {f"t{i}": tensor_of(dtype, chance.choice(SHAPES)) for i, dtype in enumerate(dtypes)}
    originals = {fqn: chance.choice([*ORDINARY, "I32", "U8", "F8_E4M3"]) for fqn in tensors}
    known = originals if chance.random() < 0.7 else {}
    pieces = [
        Chunk(fqn, box, rank)
        for fqn, tensor in tensors.items()
        for rank, box in enumerate(grid(tuple(tensor.shape), chance))
    ]
    side = tmp_path / "c/model/.hf_metadata"
    side.mkdir(parents=True)
    (side / "config.json").write_text(
        json.dumps({"torch_dtype": "float16", "inner_config": {"dtype": "float32"}})
    )
    if known:
        (side / "fqn_to_dtype_mapping.json").write_text(json.dumps(known))
    write_checkpoint(tmp_path / "c", tensors, pieces)
    report = consolidate(
        tmp_path / "c", cast_dtype=cast, num_threads=chance.choice([1, 3]), log=lambda _: None
    )
    entries = {
        f: e
        for path in report.output.glob("*.safetensors")
        for f, e in read_header(path).tensors.items()
    }
    found = {
        f: t for path in report.output.glob("*.safetensors") for f, t in load_file(path).items()
    }
    assert found.keys() == tensors.keys()
    for fqn, tensor in tensors.items():
        saved = dtype_code(str(tensor.dtype))
        want = rule(saved, known.get(fqn), cast)
        assert entries[fqn].dtype == want, (fqn, saved, known.get(fqn), cast)
        expected = tensor if want == saved else tensor.to(ORDINARY[want])
        assert found[fqn].shape == tensor.shape and (bits(found[fqn]) == bits(expected)).all(), fqn
    assert_config_agrees(report.output, {fqn: entries[fqn].dtype for fqn in tensors}, tensors)
    quantized = {
        f
        for f, t in tensors.items()
        if known.get(f, "F32") not in ORDINARY and t.dtype in ORDINARY.values()
    }
    assert any("stay float" in text for text in report.warnings) is bool(quantized)


def assert_config_agrees(
    output: Path, dtypes: dict[str, str], tensors: dict[str, torch.Tensor]
) -> None:
    config = json.loads((output / "config.json").read_bytes())
    numels = {
        code: sum(t.numel() for f, t in tensors.items() if dtypes[f] == code) for code in ORDINARY
    }
    stated = config["torch_dtype"]
    assert config["inner_config"]["dtype"] == stated
    assert numels[
        {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}[stated]
    ] == max(numels.values())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (FILE_INDEX_MAP, '{"x": 0}'),
        (FILE_INDEX_MAP, '{"x": 1, "y": "a"}'),
        (EXPECTED_TENSORS, '{"x": [1]}'),
        (EXPECTED_TENSORS, '{"x": {"shape": [-1]}}'),
        ("config.json", "{"),
    ],
)
def test_a_map_of_another_form_is_rejected(tmp_path: Path, name: str, content: str) -> None:
    directory = tmp_path / ".hf_metadata"
    directory.mkdir()
    assert read_maps(directory) == BaseMaps()
    (directory / name).write_text(content)
    with pytest.raises(CheckpointUnusable, match=name.replace(".", r"\.")):
        read_maps(directory)


def test_files_of_other_programs_are_numbered_by_name(tmp_path: Path) -> None:
    directory = tmp_path / ".hf_metadata"
    directory.mkdir()
    (directory / FILE_INDEX_MAP).write_text('{"x": "b", "y": "a", "z": "b"}')
    (directory / EXPECTED_TENSORS).write_text('{"x": {"shape": [2, 0]}}')
    (directory / "config.json").write_text('{"tie_word_embeddings": true}')
    maps = read_maps(directory)
    assert (maps.file_index, maps.shape) == ({"x": 2, "y": 1, "z": 2}, {"x": (2, 0)})
    assert maps.tie_word_embeddings and maps.names == {"x"} and not maps.is_adapter
