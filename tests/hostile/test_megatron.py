"""Checkpoints of Megatron that an attacker wrote: nothing in them is executed, and reading stays cheap."""

import argparse
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_ckpt.cli import ckpt
from tests.hostile.harness import bombs
from tests.hostile.harness.commands import check_harmless

FIXTURE = Path(__file__).parents[1] / "fixtures" / "megatron" / "llama"
CHECKPOINT = "iter_0000020"


def source_in(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return shutil.copytree(FIXTURE, tmp_path / "run" / "source")


def arguments(**changed: Any) -> dict[str, Any]:
    found = {
        "num_layers": 2,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 4,
        "swiglu": True,
        "normalization": "RMSNorm",
    }
    return {"args": argparse.Namespace(**{**found, **changed})}


def with_common(value: Any) -> Callable[[Path, Path], None]:
    def write(checkpoint: Path, marker: Path) -> None:
        torch.save(value, checkpoint / "common.pt", pickle_module=pickle)

    return write


def truncated(checkpoint: Path, marker: Path) -> None:
    data = checkpoint / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-4000])


def missing(checkpoint: Path, marker: Path) -> None:
    (checkpoint / "__1_0.distcp").unlink()


def linked(name: str) -> Callable[[Path, Path], None]:
    def link(checkpoint: Path, marker: Path) -> None:
        outside = marker.with_name("outside")
        (checkpoint / name).rename(outside)
        (checkpoint / name).symlink_to(outside)

    return link


def executing_metadata(checkpoint: Path, marker: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(bombs.Hostile(marker), protocol=4))


def deep_metadata_json(checkpoint: Path, marker: Path) -> None:
    (checkpoint / "metadata.json").write_text("[" * 60_000)
    (checkpoint / "common.pt").write_bytes(b"")


def unknown_backend(checkpoint: Path, marker: Path) -> None:
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')


@pytest.mark.parametrize(
    "damage",
    [
        with_common(arguments(num_layers=10**9)),
        with_common(
            arguments(num_layers=2, num_query_groups=4 * 10**8, num_attention_heads=8 * 10**8)
        ),
        with_common(arguments(num_attention_heads=-4)),
        with_common(arguments(kv_channels=2**70)),
        truncated,
        missing,
        linked("__1_0.distcp"),
        linked("common.pt"),
        executing_metadata,
        deep_metadata_json,
        unknown_backend,
    ],
)
def test_damaged_and_hostile_checkpoints_are_errors(
    damage: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    source = source_in(tmp_path)
    damage(source / CHECKPOINT, tmp_path / "executed")
    imported = source.parent / "imported"
    moved = [path.name for path in tmp_path.iterdir() if path.name == "outside"]
    check_harmless(source.parent, "import", source, imported, beside=moved)
    assert not imported.exists()


def test_objects_with_code_beside_the_arguments_are_not_executed(tmp_path: Path) -> None:
    hostile = bombs.Hostile(tmp_path / "executed")
    source = source_in(tmp_path)
    value = arguments(timers=hostile) | {"opt_param_scheduler": hostile}
    torch.save(value, source / CHECKPOINT / "common.pt", pickle_module=pickle)
    options = ["--config", str(FIXTURE / "expected")]
    # transformers imports modules when they are used, which the sandbox would report.
    clean = shutil.copytree(FIXTURE, tmp_path / "clean")
    assert ckpt.main(["import", str(clean), str(tmp_path / "warm"), *options]) == 0
    words = ("import", source, source.parent / "imported", *options)
    check_harmless(source.parent, *words, codes=[0], beside=["clean", "warm"])
