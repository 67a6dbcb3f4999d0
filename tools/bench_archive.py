"""Measure the size and speed of ``ckpt archive`` and ``ckpt unarchive``.

    python -m tools.bench_archive [--size 200M] [--directory DIR]

The run has two checkpoints of a model with bfloat16 weights (normal, standard deviation 0.02), float32 moments as AdamW
has them, and a step of learning rate 1e-5 between them. Needs the extra [archive]. Prints a table for
docs/performance.md; zstd without byte planes is there for comparison.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import tempfile
import time
from pathlib import Path

import torch

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions
from automodel_ckpt.convert.checkpoint_archive import archive, extract
from tools.bench_rounds import anonymous_megabytes, data_files, parse_size

_WIDTH = 1024
_SETUP = """
import sys
from pathlib import Path
from automodel_ckpt.convert.checkpoint_archive import archive, extract
source, target = map(Path, sys.argv[1:3])
"""
_ARCHIVE = "archive(source, target, delta=True, log=lambda _: None)"
_EXTRACT = "extract(source, target, log=lambda _: None)"


def save_run(directory: Path, nbytes: int, *, with_optimizer: bool) -> Path:
    """Save two checkpoints of about *nbytes* each, one step apart."""
    torch.manual_seed(0)
    bytes_per_element = 10 if with_optimizer else 2
    count = max(1, round(nbytes / (bytes_per_element * _WIDTH**2)))
    model = torch.nn.Module()
    state: dict[str, object] = {"model": model}
    for number in range(count):
        value = (0.02 * torch.randn(_WIDTH, _WIDTH)).to(torch.bfloat16)
        model.register_parameter(f"w{number}", torch.nn.Parameter(value))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for parameter in model.parameters():
        gradient = 1e-3 * torch.randn(_WIDTH, _WIDTH)
        optimizer.state[parameter] = {
            "step": torch.tensor(100.0),
            "exp_avg": 0.3 * gradient,
            "exp_avg_sq": gradient.square(),
        }
    if with_optimizer:
        state["optimizer"] = optimizer
    saver = Checkpointer(directory, options=CheckpointOptions(save_optimizer=with_optimizer))
    saver.save(state, step=1, epoch=0)
    with torch.no_grad():
        for parameter in model.parameters():
            entry = optimizer.state[parameter]
            gradient = 1e-3 * torch.randn(_WIDTH, _WIDTH)
            entry["exp_avg"].mul_(0.9).add_(gradient, alpha=0.1)
            entry["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            update = 1e-5 * entry["exp_avg"] / (entry["exp_avg_sq"].sqrt() + 1e-8)
            parameter.copy_((parameter.float() - update).to(torch.bfloat16))
    saver.save(state, step=2, epoch=0)
    saver.close()
    return directory


def plain_ratio(run: Path) -> float:
    """The ratio of zstd alone, at the same level, over the files of tensors."""
    zstandard = importlib.import_module("zstandard")
    before = 0
    after = 0
    for path in data_files(run):
        content = path.read_bytes()
        before += len(content)
        after += len(zstandard.ZstdCompressor(level=3, threads=2).compress(content))
    return before / after


def measure(run: Path, scratch: Path, *, delta: bool) -> tuple[float, float, float]:
    """(times smaller, MB/s of archiving, MB/s of extracting) for both checkpoints of a run."""
    file = scratch / "file.tar.zst"
    started = time.perf_counter()
    done = archive(run, file, delta=delta, log=lambda _: None)
    archived = time.perf_counter()
    extract(file, scratch / "back", log=lambda _: None)
    extracted = time.perf_counter()
    shutil.rmtree(scratch / "back")
    file.unlink()
    megabytes = done.nbytes / 1e6
    return (
        done.nbytes / done.archive_bytes,
        megabytes / (archived - started),
        megabytes / (extracted - archived),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("200M"))
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        print(
            "| | zstd alone | archive | MB/s in | MB/s out | with `--delta` | MB/s in | MB/s out |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for name, with_optimizer in (("weights", False), ("weights and optimizer", True)):
            run = save_run(
                scratch / name.replace(" ", "_"), arguments.size, with_optimizer=with_optimizer
            )
            cells = [f"{plain_ratio(run):.2f}"]
            for delta in (False, True):
                ratio, archiving, extracting = measure(run, scratch, delta=delta)
                cells += [f"{ratio:.2f}", f"{archiving:.0f}", f"{extracting:.0f}"]
            print(f"| {name} | {' | '.join(cells)} |")
        file = scratch / "memory.tar.zst"
        archiving = anonymous_megabytes(_SETUP, _ARCHIVE, run, file)
        extracting = anonymous_megabytes(_SETUP, _EXTRACT, file, scratch / "memory")
        print(f"\nMemory: {archiving:.0f} MB to archive, {extracting:.0f} MB to extract.")
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
