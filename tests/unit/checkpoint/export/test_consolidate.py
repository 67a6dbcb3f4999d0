"""Consolidation: every kind of tensor and cut comes out bit-equal, damage comes out as nothing at all."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from automodel_ckpt.errors import CheckpointUnusable, RecipeError, SaveFailed
from tests.support.checkpoints import consolidate
from tests.support.models.shards import Chunk, bits, cut, record_of, write_checkpoint, write_shards

Tensors = dict[str, torch.Tensor]


def zoo() -> Tensors:
    """Tensors of every kind that has bitten a peer: int, bool, fp8, 0-dim, empty, uneven, NaN and -0.0."""
    torch.manual_seed(0)
    return {
        "bf16.uneven": torch.randn(7, 5).bfloat16(),
        "f32.special": torch.tensor([[0.0, -0.0, float("nan")], [float("inf"), 1e-40, -1.0]]),
        "f64.scalar": torch.tensor(3.25, dtype=torch.float64),
        "f16.cube": torch.randn(4, 6, 5).half(),
        "i64.scalar": torch.tensor(-(2**62)),
        "i32": torch.randint(-(2**31), 2**31 - 1, (9, 3), dtype=torch.int32),
        "u8.packed": torch.randint(0, 255, (6, 4), dtype=torch.uint8),
        "bool": torch.rand(10, 3) > 0.5,
        "fp8": torch.randn(8, 4).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "one": torch.randn(1),
    }


def pieces_of(tensors: Tensors, num_ranks: int = 3, dim: int = 0) -> list[Chunk]:
    return [piece for fqn, tensor in tensors.items() for piece in cut(fqn, tensor, num_ranks, dim)]


def loaded(output: Path) -> Tensors:
    index = json.loads((output / "model.safetensors.index.json").read_bytes())
    tensors: Tensors = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(output / name)
        assert {index["weight_map"][fqn] for fqn in part} == {name}
        tensors |= part
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for t in tensors.values()
    )
    return tensors


def assert_same(output: Path, tensors: Tensors) -> None:
    found = loaded(output)
    assert found.keys() == tensors.keys()
    for fqn, tensor in tensors.items():
        assert found[fqn].dtype == tensor.dtype and found[fqn].shape == tensor.shape, fqn
        assert (bits(found[fqn]) == bits(tensor)).all(), fqn


def side_files(checkpoint: Path, **files: object) -> Path:
    directory = checkpoint / "model" / ".hf_metadata"
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / f"{name}.json").write_text(
            value if isinstance(value, str) else json.dumps(value)
        )
    return directory


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("num_procs", "num_threads"), [(1, 1), (1, 4), (3, 2)])
def test_every_kind_of_tensor_cut_along_any_dimension_is_bit_equal(
    tmp_path: Path, dim: int, num_procs: int, num_threads: int
) -> None:
    tensors = zoo()
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors, dim=dim))
    report = consolidate(tmp_path / "c", num_procs=num_procs, num_threads=num_threads)
    assert report.output == tmp_path / "c" / "model" / "consolidated" and report.checked
    assert_same(report.output, tensors)


def test_shards_without_global_shapes_get_them_from_their_extents(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 3)}
    write_shards(tmp_path, tensors, pieces_of(tensors), global_shape=False)
    assert_same(consolidate(tmp_path, tmp_path / "out").output, tensors)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


SHARD = "model/shard-00002-model-00001-of-00001.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: flip(c / SHARD, -1), "f16.cube"),
        (lambda c: flip(c / SHARD, 20), "no tensor"),
        (lambda c: flip(c / SHARD, 4090), "no tensor"),
        (lambda c: os.truncate(c / SHARD, 5000), "another size"),
        (lambda c: (c / SHARD).unlink(), "missing"),
        (
            lambda c: (c / SHARD).write_bytes(
                (c / SHARD.replace("00002", "00001", 1)).read_bytes()
            ),
            "file",
        ),
        (lambda c: (c / SHARD.replace("00002", "00009", 1)).write_bytes(b"x"), "does not know"),
        (lambda c: flip(c / "model/.hf_metadata/config.json", 3), "config.json"),
        (lambda c: flip(c / "MANIFEST.json", 100), "manifest"),
        (lambda c: (c / "MANIFEST.json").write_bytes(b""), "manifest"),
    ],
)
def test_damage_is_named_and_nothing_is_written(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    tensors = {fqn: tensor for fqn, tensor in zoo().items() if fqn in ("bf16.uneven", "f16.cube")}
    side_files(tmp_path / "c", config={"dtype": "float32"})
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors, 2))
    consolidate(tmp_path / "c")
    export = tmp_path / "c/model/consolidated"
    before = {path.name: path.stat().st_ino for path in export.iterdir()}
    damage(tmp_path / "c")
    with pytest.raises(CheckpointUnusable, match=message):
        consolidate(tmp_path / "c")
    assert {path.name: path.stat().st_ino for path in export.iterdir()} == before
    with pytest.raises(CheckpointUnusable):
        consolidate(tmp_path / "c", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def _link(directory: Path, target: str) -> None:
    (directory / "shard-00001.safetensors").symlink_to(target)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: next(iter(sorted(d.glob("shard-00002*")))).unlink(), "not in any slice"),
        (
            lambda d: (d / "z.safetensors").write_bytes(next(d.glob("shard-00001*")).read_bytes()),
            "overlap",
        ),
        (
            lambda d: (d / "z.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      "),
            "is not a shard",
        ),
        (lambda d: os.truncate(next(d.glob("shard-00001*")), 4100), "the file at byte 4100"),
        (lambda d: next(d.glob("shard-00001*")).rename(d / "x") and _link(d, "x"), "link"),
        (lambda d: os.mkfifo(d / "z.safetensors"), "not a regular file"),
        (lambda d: _sparse(d / "z.safetensors"), "nearly all hole"),
    ],
)
def test_a_bare_directory_that_is_not_whole_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    tensors = {"a": torch.randn(9, 3)}
    write_shards(tmp_path / "s", tensors, pieces_of(tensors))
    spoil(tmp_path / "s")
    with pytest.raises(CheckpointUnusable, match=message):
        consolidate(tmp_path / "s")
    assert not (tmp_path / "s/consolidated").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [({"a": 1, "b": 1, "c": 1}, "missing: 'c'"), ({"a": 1}, "not in the base: 'b'")],
)
def test_the_tensors_must_be_those_of_the_base(
    tmp_path: Path, names: dict[str, int], message: str
) -> None:
    tensors = {"a": torch.randn(2), "b": torch.randn(2)}
    side_files(tmp_path / "c", fqn_to_file_index_mapping=names)
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors))
    with pytest.raises(CheckpointUnusable, match=message):
        consolidate(tmp_path / "c")


def test_a_tensor_of_another_shape_than_expected_is_refused(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2)}
    side_files(tmp_path / "c", expected_tensors={"a": {"shape": [3]}})
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors))
    with pytest.raises(CheckpointUnusable, match="another shape"):
        consolidate(tmp_path / "c")


def test_tied_names_come_out_as_the_base_has_them(tmp_path: Path) -> None:
    tensors, tied = {"embed": torch.randn(4, 2)}, {"head": "embed"}
    for number, names in enumerate((["embed"], ["head"], ["embed", "head"])):
        checkpoint = tmp_path / str(number)
        side_files(checkpoint, fqn_to_file_index_mapping=dict.fromkeys(names, 1))
        write_checkpoint(checkpoint, tensors, pieces_of(tensors), tied=tied)
        assert_same(consolidate(checkpoint).output, dict.fromkeys(names, tensors["embed"]))
    write_checkpoint(tmp_path / "unknown", tensors, pieces_of(tensors), tied=tied)
    assert_same(consolidate(tmp_path / "unknown").output, tensors)


def test_files_are_split_as_in_the_base_and_renumbered(tmp_path: Path) -> None:
    tensors = {name: torch.randn(3) for name in "abc"}
    side_files(tmp_path / "c", fqn_to_file_index_mapping={"a": 4, "b": 2, "c": 4})
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors))
    output = consolidate(tmp_path / "c").output
    assert_same(output, tensors)
    assert set(load_file(output / "model-00002-of-00002.safetensors")) == {"a", "c"}


def header_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    found: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return found


def export_dtypes(output: Path) -> dict[str, str]:
    found: dict[str, Any] = {}
    for path in output.glob("*.safetensors"):
        found |= header_of(path)
    del found["__metadata__"]
    return {fqn: entry["dtype"] for fqn, entry in found.items()}


def test_a_quantized_tensor_saved_as_float_stays_float_and_the_config_says_so(
    tmp_path: Path,
) -> None:
    tensors = {"w": torch.randn(4, 2).bfloat16()}
    config = {
        "torch_dtype": "float16",
        "text_config": {"dtype": "float16"},
        "quantization_config": {"bits": 4},
    }
    side_files(tmp_path / "c", fqn_to_dtype_mapping={"w": "I32"}, config=config)
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors))
    report = consolidate(tmp_path / "c")
    assert export_dtypes(report.output) == {"w": "BF16"}
    assert any(
        "1 tensor is quantized in the base and float here; it stays float" in text
        for text in report.warnings
    )
    found = json.loads((report.output / "config.json").read_bytes())
    assert found == {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}


def test_a_config_of_an_earlier_checkpoint_gets_the_keys_that_other_programs_read(
    tmp_path: Path,
) -> None:
    config = {"model_type": "llama", "dtype": "float32", "rope_parameters": {"rope_theta": 7.0}}
    tensors = {"w": torch.randn(4)}
    side_files(tmp_path / "c", config=json.dumps(config), fqn_to_dtype_mapping={"w": "F32"})
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors))
    exported = json.loads((consolidate(tmp_path / "c").output / "config.json").read_bytes())
    assert exported == {**config, "torch_dtype": "float32", "rope_theta": 7.0}


def test_side_files_are_byte_equal_and_a_config_that_agrees_is_not_touched(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4)}
    text = '{"dtype":\t"float32"  }\r\n'
    directory = side_files(
        tmp_path / "c", config=text, tokenizer="{}\n\n", fqn_to_dtype_mapping={"w": "F32"}
    )
    (directory / "modeling_x.py").write_bytes(b"x = 1\r\n")
    (directory / "model-9.safetensors").write_bytes(b"stray")
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors))
    output = consolidate(tmp_path / "c").output
    for name in ("config.json", "tokenizer.json", "modeling_x.py"):
        assert (output / name).read_bytes() == (directory / name).read_bytes()
    assert not (output / "fqn_to_dtype_mapping.json").exists()
    assert not (output / "model-9.safetensors").exists()
    cast = consolidate(tmp_path / "c", tmp_path / "cast", cast_dtype="bf16").output
    assert json.loads((cast / "config.json").read_bytes()) == {"dtype": "bfloat16"}


def test_the_export_lists_its_files_and_takes_the_modes_of_the_umask(tmp_path: Path) -> None:
    tensors = zoo()
    checkpoint = tmp_path / "c"
    write_checkpoint(checkpoint, tensors, pieces_of(tensors))
    before = os.umask(0o027)
    try:
        output = consolidate(checkpoint).output
    finally:
        os.umask(before)
    listing = json.loads((output / "export_manifest.json").read_bytes())
    assert listing["step"] == 20 and listing["checked"] is True
    for path in output.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path
        if path.name != "export_manifest.json":
            record = record_of(path)
            entry = listing["files"][path.name]
            assert entry["size"] == record.size
            if "parts" in entry:
                data, at = path.read_bytes(), 0
                for nbytes, digest in entry["parts"]:
                    found = xxhash.xxh3_128_hexdigest(data[at : at + nbytes])
                    assert digest == f"xxh3_128:{found}"
                    at += nbytes
                assert at == record.size
            else:
                assert entry == {"size": record.size, "digest": record.digest}
    model = output / "model-00001-of-00001.safetensors"
    assert header_of(model)["__metadata__"]["format"] == "pt"
    with model.open("rb") as content:
        assert (8 + int.from_bytes(content.read(8), "little")) % 4096 == 0


def consolidated_once(tmp_path: Path) -> Path:
    tensors = {"w": torch.randn(4)}
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors))
    return consolidate(tmp_path / "c").output


def test_files_that_no_export_made_are_never_replaced(tmp_path: Path) -> None:
    output = consolidated_once(tmp_path)
    (output / "notes.txt").write_text("mine")
    with pytest.raises(SaveFailed, match=r"notes\.txt"):
        consolidate(tmp_path / "c")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    for target in (tmp_path / "home", tmp_path / "home" / "thesis.tex", tmp_path / "c", tmp_path):
        with pytest.raises(SaveFailed):
            consolidate(tmp_path / "c", target)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "mine" and (
        output / "notes.txt"
    ).exists()
    (tmp_path / "empty").mkdir()
    assert len(loaded(consolidate(tmp_path / "c", tmp_path / "empty").output)) == 1


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(4)}
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors))
    with pytest.raises(RecipeError, match="unknown dtype"):
        consolidate(tmp_path / "c", cast_dtype="int8")
    for number in (0, -1, 10**8):
        for name in ("num_procs", "num_threads"):
            with pytest.raises(RecipeError, match="from 1 to 1024"):
                consolidate(tmp_path / "c", **{name: number})
    assert not (tmp_path / "c/model/consolidated").exists()


def test_the_tool_imports_no_torch_and_no_numpy_where_nothing_is_cast(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(40, 3)}
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors))
    code = (
        "import runpy, sys; sys.argv[1:1] = ['-i']; sys.argv[3:3] = ['-o']\n"
        "try: runpy.run_module('automodel_ckpt.consolidate', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    for number, (cast, expected) in enumerate(
        (([], "0 False False"), (["--cast-dtype", "bf16"], "0 False True"))
    ):
        arguments = [sys.executable, "-c", code, tmp_path / "c", tmp_path / str(number), *cast]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == expected, done.stderr


def test_casting_and_gathering_take_no_memory_that_grows_with_the_model(tmp_path: Path) -> None:
    tensors = {"w": torch.zeros(4096, 8192), "v": torch.zeros(4096, 8192)}
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors, 2, dim=1))
    code = (
        "import re, sys, threading, time; from automodel_ckpt.cli.ckpt import main\n"
        "import numpy\n"
        "rss = lambda: int(re.search(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "start, peak, done = rss(), [0], threading.Event()\n"
        "def watch():\n"
        "    while not done.wait(0.005): peak[0] = max(peak[0], rss())\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "main(['consolidate', sys.argv[1], '--cast-dtype', 'bf16']); done.set(); thread.join()\n"
        "print((peak[0] - start) // 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "c"], capture_output=True, text=True, timeout=100
    )
    assert int(done.stdout.splitlines()[-1]) < 100, done.stdout + done.stderr


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_quantization_stays_in_the_config_while_one_tensor_is_quantized(
    tmp_path: Path, is_mixed: bool
) -> None:
    tensors = {"w": torch.randn(4, 2).bfloat16(), "norm": torch.ones(4).bfloat16()}
    originals = {"w": "I32", "norm": "BF16"}
    if is_mixed:
        tensors["packed"] = torch.ones(4, dtype=torch.int32)
        originals["packed"] = "I32"
    side_files(
        tmp_path / "c",
        fqn_to_dtype_mapping=originals,
        config={"dtype": "bfloat16", "quantization_config": {"bits": 4}},
    )
    write_checkpoint(tmp_path / "c", tensors, pieces_of(tensors))
    report = consolidate(tmp_path / "c")
    config = json.loads((report.output / "config.json").read_bytes())
    assert ("quantization_config" in config) is is_mixed
    said = "some tensors are still quantized" if is_mixed else "loses its quantization_config"
    assert any(said in text for text in report.warnings)


def test_a_link_in_the_checkpoint_does_not_choose_where_an_export_is_written(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "c"
    tensors = zoo()
    write_checkpoint(checkpoint, tensors, pieces_of(tensors))
    (tmp_path / "elsewhere").mkdir()
    (checkpoint / "model" / "consolidated").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SaveFailed, match="symbolic link"):
        consolidate(checkpoint)
    assert not any((tmp_path / "elsewhere").iterdir())
    link = checkpoint / "model" / "consolidated"
    assert consolidate(checkpoint, output=link).output == tmp_path / "elsewhere"
