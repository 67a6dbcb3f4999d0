"""Time and memory of ``ckpt import``, beside a durable copy of the same files.

    python -m tools.bench_import [KIND ...] [--gigabytes 4] [--rounds 2] [--directory DIR] [--docs]

For each kind of checkpoint, writes one of the given size with random weights, and then alternates `cp` with an fsync of
each file, and `ckpt import`. Reports the ratio of the medians within this run, and the largest anonymous memory of the
import (RssAnon of its processes: what the page cache does not count). DIR needs three times the size.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from automodel_ckpt.convert.archives import pack
from automodel_ckpt.durable_io import fsync_directory, fsync_file
from tools.bench_report import write_block

_ROWS = 4096
_COLUMNS = 4096
_POLL_SECONDS = 0.02


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=[], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--docs", action="store_true", help="write the table into docs/performance.md"
    )
    arguments = parser.parse_args()
    rows: list[str] = []
    for kind in arguments.kinds or KINDS:
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-import-") as work:
            rows.append(_measured(kind, Path(work), arguments.gigabytes, arguments.rounds))
        print(rows[-1], flush=True)
    if arguments.docs:
        size = f"{arguments.gigabytes:g} GB"
        head = [
            f"Importing a checkpoint of {size}, beside `cp` and fsync of the same files in the same run",
            "(`python -m tools.bench_import --docs`). Memory: anonymous memory of the import at its largest.",
            "",
            "| kind | cp, s | import, s | speed of the import / cp | memory, MB |",
            "|---|---|---|---|---|",
        ]
        write_block("bench-import", "\n".join([*head, *rows]))
    return 0


def _measured(kind: str, work: Path, gigabytes: float, rounds: int) -> str:
    source = work / "source"
    source.mkdir()
    # In a new process: its memory must not stay in this one, from which the measured ones are started.
    make = f"from tools.bench_import import make; make({kind!r}, {str(source)!r}, {gigabytes})"
    subprocess.run([sys.executable, "-c", make], check=True)
    named = source / _NAMES[kind] if kind in _NAMES else source
    copies: list[float] = []
    imports: list[float] = []
    memory = 0
    for number in range(rounds):
        copies.append(_copy_seconds(source, work / "copy"))
        shutil.rmtree(work / "copy")
        seconds, anonymous = _import(named, work / f"run{number}")
        shutil.rmtree(work / f"run{number}")
        imports.append(seconds)
        memory = max(memory, anonymous)
    copied, imported = statistics.median(copies), statistics.median(imports)
    ratio = copied / imported
    return f"| {kind} | {copied:.1f} | {imported:.1f} | {ratio:.2f} | {memory / 1e6:.0f} |"


def _copy_seconds(source: Path, target: Path) -> float:
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    for parent, _, names in os.walk(target):
        for name in names:
            fsync_file(Path(parent, name))
        fsync_directory(Path(parent))
    return time.perf_counter() - begin


def _import(source: Path, run: Path) -> tuple[float, int]:
    """Return the seconds that the command took, and its largest anonymous memory in bytes."""
    command = [sys.executable, "-m", "automodel_ckpt.cli.ckpt", "import", str(source), str(run)]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    largest = 0
    while process.poll() is None:
        largest = max(largest, _anonymous_bytes(process.pid))
        time.sleep(_POLL_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - begin, largest


def _anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process and its children in bytes; 0 if it has ended."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total = int(line.split()[1]) * 1024
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return total
    return total + sum(_anonymous_bytes(int(child)) for child in children)


# ---------------------------------------------------------------- the kinds


def make(kind: str, directory: str, gigabytes: float) -> None:
    """Write a checkpoint of *kind* with about *gigabytes* of float32 weights into *directory*."""
    torch.manual_seed(0)
    KINDS[kind](Path(directory), _weights(gigabytes))


def _weights(gigabytes: float) -> dict[str, torch.Tensor]:
    count = max(1, round(gigabytes * 1e9 / (_ROWS * _COLUMNS * 4)))
    tensors: dict[str, torch.Tensor] = {}
    for number in range(count):
        tensors[f"model.layers.{number}.weight"] = torch.rand(_ROWS, _COLUMNS)
    return tensors


def _shards(weights: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights in four parts."""
    names = list(weights)
    size = -(-len(names) // 4)
    for begin in range(0, len(names), size):
        yield {name: weights[name] for name in names[begin : begin + size]}


def _hugging_face(directory: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    for number, part in enumerate(_shards(weights)):
        save_file(part, directory / f"part-{number}.safetensors", {"format": "pt"})


def _torch_file(directory: Path, weights: Mapping[str, torch.Tensor]) -> None:
    torch.save({"model": dict(weights), "step": 1}, directory / "model.pt")


def _transposed(directory: Path, weights: Mapping[str, torch.Tensor]) -> None:
    torch.save({name: value.T for name, value in weights.items()}, directory / "model.pt")


def _dcp(directory: Path, weights: Mapping[str, torch.Tensor]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(weights), checkpoint_id=directory, no_dist=True)


def _deepspeed(directory: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write ZeRO stage 2 of two ranks, as DeepSpeed 0.19 does: each rank has half of the concatenated parameters."""
    tag = directory / "global_step1"
    tag.mkdir()
    (directory / "latest").write_text(tag.name)
    shapes = {name: value.shape for name, value in weights.items()}
    states = {"module": {}, "param_shapes": [shapes], "buffer_names": [], "dp_world_size": 2}
    torch.save({**states, "ds_version": "0.19.8"}, tag / "mp_rank_00_model_states.pt")
    names = list(weights)
    half = len(names) // 2
    for rank, part in enumerate((names[:half], names[half:])):
        flat = torch.cat([weights[name].reshape(-1) for name in part])
        optimizer = {
            "zero_stage": 2,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [flat],
        }
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"},
            tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        del flat


def _nemo(directory: Path, weights: Mapping[str, torch.Tensor]) -> None:
    torch.save(dict(weights), directory / "model_weights.ckpt")
    _pack_nemo(directory)


def _nemo_ranks(directory: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Write two tensor-parallel ranks of row-parallel layers: each has half of the columns of each row."""
    for rank in range(2):
        state = {}
        for number, value in enumerate(weights.values()):
            name = f"model.decoder.layers.{number}.mlp.linear_fc2.weight"
            state[name] = value.chunk(2, dim=1)[rank].clone()
        target = directory / f"mp_rank_0{rank}"
        target.mkdir()
        torch.save(state, target / "model_weights.ckpt")
        del state
    _pack_nemo(directory)


def _pack_nemo(directory: Path) -> None:
    """Replace the files in *directory* by a .nemo file of them."""
    (directory / "model_config.yaml").write_text("activation: gelu\n")
    packed = directory.with_name("packed.nemo")
    pack(directory, packed, lambda _: None)
    shutil.rmtree(directory)
    directory.mkdir()
    packed.rename(directory / "model.nemo")


Make = Callable[[Path, Mapping[str, torch.Tensor]], None]
KINDS: Mapping[str, Make] = {
    "safetensors": _hugging_face,
    "torch": _torch_file,
    "dcp": _dcp,
    "deepspeed": _deepspeed,
    "torch-transposed": _transposed,
    "nemo": _nemo,
    "nemo-ranks": _nemo_ranks,
}
_NAMES = {
    "torch": "model.pt",
    "torch-transposed": "model.pt",
    "nemo": "model.nemo",
    "nemo-ranks": "model.nemo",
}
"""The file to import, where it is not the directory."""

if __name__ == "__main__":
    raise SystemExit(main())
