"""The rows of :mod:`tools.bench.checkpoint` about consolidating, compared with ``cp`` of the same bytes.

Our consolidations are durable and compare every byte with its digest. Torch's do neither; its files are fsynced
afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from tools.bench.rounds import (
    ROOT,
    Group,
    Row,
    data_files,
    fsync_all,
    in_this_process,
    rounds,
    warm,
)
from tools.bench.sources import write_source


def sources(root: Path, size: int) -> dict[str, Path]:
    """The checkpoints to consolidate, all of about *size* bytes."""
    return {
        "2 shards": write_source(root / "one", size),
        "4 files": write_source(root / "four", size, num_files=4),
        "8 shards": write_source(root / "eight", size, num_shards=8),
        "dim 1": write_source(root / "dim1", size, num_shards=8, dim=1),
        "F32": write_source(root / "f32", size, dtype="F32"),
    }


def copied(source: Path) -> Callable[[Path], None]:
    """``cp`` of a checkpoint's shards, clones of whole files excluded."""

    def run(directory: Path) -> None:
        subprocess.run(
            ["cp", "--reflink=never", *map(str, data_files(source)), str(directory)], check=True
        )
        fsync_all(directory)

    return run


def ours(source: Path, cast: str | None = None) -> Callable[[Path], object]:
    return lambda directory: consolidate(
        source, directory / "out", cast_dtype=cast, log=lambda _: None
    )


def our_process(source: Path) -> Callable[[Path], object]:
    command = [sys.executable, "-m", "automodel_ckpt.consolidate", "-i", str(source), "-o"]
    return lambda directory: subprocess.run(
        [*command, str(directory / "out")], check=True, capture_output=True, cwd=ROOT
    )


def torchs(source: Path) -> Callable[[Path], None]:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    numbers = json.loads(
        (source / "model/.hf_metadata/fqn_to_file_index_mapping.json").read_bytes()
    )

    def run(directory: Path) -> None:
        consolidate_safetensors_files(str(source / "model"), str(directory), numbers, num_threads=5)
        fsync_all(directory)

    return run


def rows(found: dict[str, Path]) -> Iterator[Row]:
    """Yield the rows: ours are durable and verified, the files of the others are fsynced afterwards."""
    one, four, dim1 = found["2 shards"], found["4 files"], found["dim 1"]
    yield Row("cp + fsync", copied(one))
    yield _row("ours: 2 shards, 1 file", ours(one), one, ours=True)
    yield _row("ours: 2 shards, 4 files", ours(four), four, ours=True)
    yield _row("ours: 8 shards, 1 file", ours(found["8 shards"]), found["8 shards"], ours=True)
    yield _row("ours: 8 shards sharded along dim 1, 1 file", ours(dim1), dim1, ours=True)
    yield _row(
        "ours: F32 cast to BF16, per byte read", ours(found["F32"], "bf16"), found["F32"], ours=True
    )
    yield _row("ours: 2 shards, 1 file, whole process", our_process(one), one, ours=True)
    yield _row("torch: 2 shards, 1 file", torchs(one), one, slow=True)
    yield _row("torch: 2 shards, 4 files", torchs(four), four, slow=True)
    yield _row("torch: 8 shards sharded along dim 1, 1 file", torchs(dim1), dim1, slow=True)


def _row(
    name: str,
    run: Callable[[Path], object],
    source: Path,
    *,
    ours: bool = False,
    slow: bool = False,
) -> Row:
    return Row(
        name,
        run,
        ours=ours,
        slow=slow,
        nbytes=sum(path.stat().st_size for path in data_files(source)),
    )


def measure(root: Path, size: int, num_rounds: int) -> Group:
    """Measure all rows."""
    found = sources(root / "sources", size)
    inputs = [path for source in found.values() for path in data_files(source)]
    nbytes = sum(path.stat().st_size for path in data_files(found["2 shards"]))
    group = Group("consolidating, compared with cp and fsync", nbytes, list(rows(found)))
    warm(inputs)
    rounds(group, num_rounds, root / "out", os.sync, in_this_process)
    shutil.rmtree(root / "sources")
    return group
