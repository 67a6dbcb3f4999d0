"""Compare the cost of consolidating with ``cp`` of the same bytes. checkpoint.py runs this, too.

    python -m tools.bench.consolidate [--size 1G] [--runs 3] [--directory DIR] [--automodel-tool FILE]

Our consolidations are durable and compare every byte with its digest. Torch's and NeMo AutoModel's do neither. In the
groups with fsync, their files are fsynced afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from automodel_ckpt.checkpoint.export.consolidate import consolidate
from tools.bench.rounds import (
    ROOT,
    Group,
    Memory,
    Row,
    anonymous_megabytes,
    cold,
    data_files,
    fsync_all,
    in_this_process,
    parse_size,
    rounds,
    unflushed,
    warm,
)
from tools.bench.sources import write_source

_TORCH = "from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files"
_OURS = "from automodel_ckpt.checkpoint.export.consolidate import consolidate"


def sources(root: Path, size: int) -> dict[str, Path]:
    """The checkpoints to consolidate, all of about *size* bytes."""
    return {
        "2 shards": write_source(root / "one", size),
        "4 files": write_source(root / "four", size, num_files=4),
        "8 shards": write_source(root / "eight", size, num_shards=8),
        "dim 1": write_source(root / "dim1", size, num_shards=8, dim=1),
        "F32": write_source(root / "f32", size, dtype="F32"),
    }


def copied(source: Path, *, durable: bool) -> Callable[[Path], None]:
    """``cp`` of a checkpoint's shards, clones of whole files excluded."""

    def run(directory: Path) -> None:
        subprocess.run(
            ["cp", "--reflink=never", *map(str, data_files(source)), str(directory)], check=True
        )
        if durable:
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


def torchs(source: Path, *, durable: bool) -> Callable[[Path], None]:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    numbers = json.loads(
        (source / "model/.hf_metadata/fqn_to_file_index_mapping.json").read_bytes()
    )

    def run(directory: Path) -> None:
        consolidate_safetensors_files(str(source / "model"), str(directory), numbers, num_threads=5)
        if durable:
            fsync_all(directory)

    return run


def automodels(tool: Path, source: Path, *, durable: bool) -> Callable[[Path], None]:
    def run(directory: Path) -> None:
        taken = directory / "input"  # the tool moves the side files away from there
        shutil.copytree(source / "model", taken, copy_function=os.link)
        options = [
            "--model-name",
            "model",
            "--input-dir",
            str(taken),
            "--output-dir",
            str(directory / "out"),
        ]
        subprocess.run([sys.executable, str(tool), *options], check=True, capture_output=True)
        shutil.rmtree(taken)
        if durable:
            fsync_all(directory)

    return run


def rows(
    found: dict[str, Path], tool: Path | None, *, durable: bool, is_cold: bool
) -> Iterator[Row]:
    """The rows of one group."""
    one, four, dim1 = found["2 shards"], found["4 files"], found["dim 1"]
    yield Row("cp + fsync" if durable else "cp", copied(one, durable=durable))
    yield _row("ours: 2 shards, 1 file", ours(one), one, ours=True)
    yield _row("ours: 2 shards, 4 files", ours(four), four, ours=True)
    yield _row("ours: 8 shards, 1 file", ours(found["8 shards"]), found["8 shards"], ours=True)
    yield _row("ours: 8 shards sharded along dim 1, 1 file", ours(dim1), dim1, ours=True)
    yield _row(
        "ours: F32 cast to BF16, per byte read", ours(found["F32"], "bf16"), found["F32"], ours=True
    )
    yield _row("ours: 2 shards, 1 file, whole process", our_process(one), one, ours=True)
    if not durable:
        yield _row("ours: 2 shards, without fsync (benchmark only)", unflushed(ours(one)), one)
    yield _row("torch: 2 shards, 1 file", torchs(one, durable=durable), one, slow=True)
    if not is_cold:
        yield _row("torch: 2 shards, 4 files", torchs(four, durable=durable), four, slow=True)
        yield _row(
            "torch: 8 shards sharded along dim 1, 1 file",
            torchs(dim1, durable=durable),
            dim1,
            slow=True,
        )
    if tool is not None:
        run = automodels(tool, one, durable=durable)
        yield _row("AutoModel: 2 shards, 1 file, whole process", run, one, slow=True)


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


def measure(
    root: Path, size: int, num_rounds: int, tool: Path | None
) -> tuple[list[Group], list[Memory]]:
    """All groups of consolidation, and the memory that it takes."""
    found = sources(root / "sources", size)
    inputs = [path for source in found.values() for path in data_files(source)]
    nbytes = sum(path.stat().st_size for path in data_files(found["2 shards"]))
    groups = []
    for is_cold in (False, True):
        for durable in (False, True):
            cache = "cold" if is_cold else "warm"
            baseline = "cp and fsync" if durable else "cp"
            title = f"consolidating, {cache}, compared with {baseline}"
            group = Group(title, nbytes, list(rows(found, tool, durable=durable, is_cold=is_cold)))
            warm(inputs)
            rounds(
                group,
                num_rounds,
                root / "out",
                partial(cold, inputs) if is_cold else os.sync,
                in_this_process,
            )
            groups.append(group)
    memory = memories(found, root / "out")
    shutil.rmtree(root / "sources")
    return groups, memory


def memories(found: dict[str, Path], output: Path) -> list[Memory]:
    """Anonymous memory of fresh processes."""
    code = "consolidate(sys.argv[1], sys.argv[2], cast_dtype=sys.argv[3], log=lambda _: None)"
    measured = []
    for name, cast in (("2 shards", ""), ("dim 1", ""), ("F32", "bf16")):
        shutil.rmtree(output, ignore_errors=True)
        label = f"consolidating, ours: {name}{', cast to BF16' if cast else ''}"
        measured.append(Memory(label, anonymous_megabytes(_OURS, code, found[name], output, cast)))
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    source = found["2 shards"] / "model"
    numbers = source / ".hf_metadata/fqn_to_file_index_mapping.json"
    code = (
        "numbers = json.load(open(sys.argv[3]))\n"
        "consolidate_safetensors_files(sys.argv[1], sys.argv[2], numbers, num_threads=5)"
    )
    theirs = anonymous_megabytes(_TORCH, code, source, output, numbers)
    measured.append(Memory("consolidating, torch: 2 shards", theirs))
    shutil.rmtree(output)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=parse_size, default="1G", help="bytes of weights: 64M, 1G (default)"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    parser.add_argument(
        "--automodel-tool",
        type=Path,
        metavar="FILE",
        help="offline_hf_consolidation.py of NeMo AutoModel",
    )
    arguments = parser.parse_args()
    from tools.bench.report import as_text
    from tools.bench.rounds import as_json

    with tempfile.TemporaryDirectory(prefix="bench-consolidate-", dir=arguments.directory) as root:
        groups, memory = measure(
            Path(root), arguments.size, arguments.runs, arguments.automodel_tool
        )
    print(as_text(as_json(groups, memory, arguments.size)))


if __name__ == "__main__":
    main()
