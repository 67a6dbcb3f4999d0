"""Measure the size and speed of ``ckpt archive`` and ``ckpt unarchive``.

    python -m tools.bench_archive [--size 200M] [--directory DIR] [--trained]

The run has two checkpoints of a model with bfloat16 weights (normal, standard deviation 0.02), float32 moments as AdamW
has them, and a step of learning rate 1e-5 between them. Needs the extra [archive]. Prints a table for
docs/performance.md; zstd without byte planes is there for comparison.

With --trained, trains a small Llama on source code instead, first with a learning rate of 1e-3, then with 1e-5, and
prints how much smaller one checkpoint becomes, alone and as a difference to one some steps before.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from automodel_ckpt.checkpoint import Checkpointer, CheckpointOptions
from automodel_ckpt.convert.checkpoint_archive.reading import extract
from automodel_ckpt.convert.checkpoint_archive.writing import archive
from tools.bench_rounds import anonymous_megabytes, data_files, parse_size

_WIDTH = 1024
_LENGTH = 128
_BATCH = 4
_FIRST_STEPS = 80
_WARM_STEPS = 10
# Steps between two checkpoints.
_DISTANCES = (1, 10, 30)
_SETUP = """
import sys
from pathlib import Path
from automodel_ckpt.convert.checkpoint_archive.reading import extract
from automodel_ckpt.convert.checkpoint_archive.writing import archive
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


# ---------------------------------------------------------------- a model that trains


def trained_rows(directory: Path) -> Iterator[str]:
    """Yield the rows of the table of a trained model: weights alone, and with AdamW's moments."""
    torch.manual_seed(0)
    tokens = _tokens()
    model = _llama(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _train(model, optimizer, tokens, _FIRST_STEPS)
    for title, dtype, stored in (
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("bfloat16 of float32", torch.float32, torch.bfloat16),
    ):
        tuned = _llama(dtype)
        tuned.load_state_dict(model.state_dict())
        optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-5)
        _train(tuned, optimizer, tokens, _WARM_STEPS)
        first = _copied(tuned, optimizer, stored)
        done = 0
        for num_steps in _DISTANCES:
            _train(tuned, optimizer, tokens, num_steps - done)
            done = num_steps
            cells = [title, str(num_steps)]
            for with_optimizer in (False, True):
                second = _copied(tuned, optimizer, stored)
                cells += _ratios(directory, (first, second), with_optimizer)
            yield f"| {' | '.join(cells)} |"


def _tokens() -> torch.Tensor:
    """The bytes of modules of Python's standard library."""
    text = bytearray()
    for path in sorted(Path(importlib.__file__).parents[1].glob("[a-d]*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8).long()


def _llama(dtype: torch.dtype) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    model: torch.nn.Module = LlamaForCausalLM(config).to(dtype)  # type: ignore[arg-type]
    return model


def _train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, steps: int
) -> None:
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - _LENGTH, (_BATCH, 1))
        batch = tokens[starts + torch.arange(_LENGTH)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _copied(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, stored: torch.dtype
) -> dict[str, torch.nn.Module]:
    """The parameters as they are *stored*, and the moments of each, as modules that can be saved."""
    found = {"model": torch.nn.Module(), "moments": torch.nn.Module()}
    for number, parameter in enumerate(model.parameters()):
        value = parameter.detach().to(stored, copy=True)
        found["model"].register_buffer(f"w{number}", value)
        for entry in ("exp_avg", "exp_avg_sq"):
            moment = optimizer.state[parameter][entry].clone()
            found["moments"].register_buffer(f"{entry}{number}", moment)
    return found


def _ratios(
    directory: Path,
    states: tuple[Mapping[str, torch.nn.Module], Mapping[str, torch.nn.Module]],
    with_optimizer: bool,
) -> list[str]:
    """Save two states; return how much smaller the second one becomes, alone and as a difference."""
    run = directory / "trained"
    saver = Checkpointer(run, options=CheckpointOptions())
    for step, state in enumerate(states, 1):
        saved = dict(state)
        if not with_optimizer:
            del saved["moments"]
        saver.save(saved, step=step, epoch=0)
    saver.close()
    cells: list[str] = []
    for delta in (False, True):
        file = directory / "trained.tar.zst"
        done = archive(run / "epoch_0_step_2", file, delta=delta, log=lambda _: None)
        cells.append(f"{done.nbytes / done.archive_bytes:.2f}")
        file.unlink()
    shutil.rmtree(run)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("200M"))
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--trained", action="store_true", help="compression of a trained model")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        if arguments.trained:
            print("| weights | steps | weights | with `--delta` | and moments | with `--delta` |")
            print("|---|---|---|---|---|---|")
            for row in trained_rows(scratch):
                print(row, flush=True)
            return
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
