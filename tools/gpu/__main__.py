"""Measure and test training on one GPU: python -m tools.gpu [PART ...] [--dry-run] [--out DIR] [--minutes N]

Without a PART, all parts run in order. Each writes DIR/PART.json (default: $OUT, else runs/gpu) after each measurement,
and can be stopped at any point. `--dry-run` runs the same code with tiny models on the CPU. `--report` compares the
figures in DIR with the goals; `--docs` writes them to docs/performance.md. Exit code 0 if nothing failed, 1 if a
measurement failed, 128 + the signal's number if a signal ended it.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from automodel_ckpt.cli.launch.gpu_properties import without_initializing_cuda
from tools.gpu import goals, machine
from tools.gpu.session import NoBase, PartRun, Session, exit_on_signals
from tools.support import ROOT, parser_of

PART_SECONDS = 480.0
"""The most that a part takes."""
_SCRATCH = "ckpt-gpu-"


IMPORTED = (
    "torch", "transformers", "peft", "automodel_ckpt.cli.train", "tools.gpu.timed",
    "transformers.models.llama.modeling_llama", "transformers.optimization",
)  # fmt: skip
"""What each measurement would import otherwise."""
PARTS: dict[str, float] = {
    "tests": 300,
    "lora": 250,
    "qlora": 90,
    "packing": 120,
    "head": 60,
    "full": 270,
    "saves": 240,
    "vlm": 90,
}
"""All parts in the order of `make gpu`, so that those with the same base follow each other, and about how many seconds
each needs: less than 30 minutes. A part is a module of :mod:`tools.gpu.parts` with a function ``run(part)``."""


def main() -> int:
    parser = parser_of(__doc__, prog="python -m tools.gpu")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", metavar="DIR", help="where the figures go")
    parser.add_argument("--dry-run", action="store_true", help="tiny models, on the CPU")
    parser.add_argument("--minutes", type=float, default=30.0, help="the most that it takes (30)")
    only = "leave out measurements with names that do not contain this regular expression"
    parser.add_argument("--only", metavar="PATTERN", default="", help=only)
    parser.add_argument("--report", action="store_true", help="compare the figures with the goals")
    parser.add_argument("--docs", action="store_true", help="write them to docs/performance.md")
    given = parser.parse_args()
    out = Path(given.out or os.environ.get("OUT") or ROOT / "runs" / "gpu").resolve()
    if given.report or given.docs:
        return goals.report(out, docs=given.docs)
    if unknown := sorted(set(given.parts) - PARTS.keys()):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    exit_on_signals()
    return run_parts(given.parts or list(PARTS), out, given)


def run_parts(parts: list[str], out: Path, given: argparse.Namespace) -> int:
    """Run the named parts; returns the exit code.

    Their temporary models and checkpoints are removed, whatever happens.
    """
    ends = time.monotonic() + 60 * given.minutes
    out.mkdir(parents=True, exist_ok=True)
    # Before torch is imported.
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    # torch.cuda.is_available() then counts the GPUs, which a forked process does: CUDA does not survive a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if given.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with _scratch_directory() as scratch:
        print("importing torch, transformers and the recipes", flush=True)
        with without_initializing_cuda():
            for name in IMPORTED:
                import_module(name)
            has_gpu = import_module("torch").cuda.is_available()
        device = "cuda" if has_gpu and not given.dry_run else "cpu"
        session = Session(device, given.dry_run, scratch, out, machine.describe(), given.only)
        if device != "cuda" and not given.dry_run:
            print("no CUDA device: nothing was measured (--dry-run runs tiny models on the CPU)")
            return 3
        num_failed = 0
        for number, name in enumerate(parts):
            # Its share of the time that is left: what a part does not need goes to those after it.
            share = PARTS[name] / sum(PARTS[later] for later in parts[number:])
            seconds = min(share * (ends - time.monotonic()), PART_SECONDS)
            num_failed += run_part(name, session, seconds)
    print(goals.table_text(out))
    print(f"figures: {out}")
    return 1 if num_failed else 0


def run_part(name: str, session: Session, seconds: float) -> int:
    """Run one part for at most some *seconds*; returns the number of measurements that failed."""
    # pytest would collect a module with the name ``tests``.
    module = import_module(f"tools.gpu.parts.{'gpu_tests' if name == 'tests' else name}")
    print(f"{name} (at most {seconds:.0f} s): {str(module.__doc__).splitlines()[0]}", flush=True)
    part = PartRun(session, name, seconds)
    try:
        with suppress(NoBase):
            module.run(part)
    except SystemExit as stop:
        part.write(f"stopped, code {stop.code}")
        raise
    part.write("done")
    return len(part.failed)


@contextmanager
def _scratch_directory() -> Iterator[Path]:
    """A temporary directory for models and checkpoints. Those of calls that were killed are removed first."""
    place = Path(os.environ.get("GPU_SCRATCH") or tempfile.gettempdir())
    place.mkdir(parents=True, exist_ok=True)
    for path in place.glob(f"{_SCRATCH}*"):
        owner = path.name.removeprefix(_SCRATCH).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-", dir=place))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
