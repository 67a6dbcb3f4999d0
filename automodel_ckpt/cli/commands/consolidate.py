"""``python -m automodel_ckpt.consolidate``: the command of ``consolidate.sh`` and tools/offline_hf_consolidation.py.

Takes the arguments of NeMo AutoModel's offline tool, so that either tool can replace the other. Started by torchrun
with several processes, only rank 0 works, with as many processes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from automodel_ckpt.checkpoint.export.consolidate import ConsolidationReport, consolidate
from automodel_ckpt.cli.terminal import print_error, print_path, printable
from automodel_ckpt.errors import EXIT_DONE, AutomodelError, RecipeError, describe, limit_error
from automodel_ckpt.units import size_text


def parser() -> argparse.ArgumentParser:
    """The tool's command line."""
    result = argparse.ArgumentParser(
        prog="offline_hf_consolidation",
        description="Export a sharded checkpoint as Hugging Face files.",
        epilog="Environment: NPROC_PER_NODE, the default of --nproc.",
    )
    result.add_argument(
        "-m",
        "--model-name",
        help="name of the base model for messages; metadata is read from .hf_metadata",
    )
    result.add_argument(
        "-i",
        "--input-dir",
        required=True,
        help="a checkpoint, its model/, or a directory of shards",
    )
    result.add_argument(
        "-o", "--output-dir", help="default: consolidated/ in the model's directory"
    )
    result.add_argument(
        "--num-threads", type=int, default=5, help="threads of each process (default: 5)"
    )
    result.add_argument("--nproc", type=int, help="processes (default: NPROC_PER_NODE, or 1)")
    result.add_argument(
        "--cast-dtype", metavar="DTYPE", help="bf16, fp16, fp32 or fp64: cast every ordinary float"
    )
    result.add_argument(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="accepted for compatibility; has no effect",
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code. The directory it wrote is the only line on standard output."""
    arguments = parser().parse_args(argv)
    if os.environ.get("RANK", "0") != "0":
        return EXIT_DONE
    try:
        num_procs = arguments.nproc or _processes()
        export(
            arguments.input_dir,
            arguments.output_dir,
            arguments.cast_dtype,
            num_procs,
            arguments.num_threads,
        )
    except (AutomodelError, KeyboardInterrupt) as error:
        code, message = describe(error)
        print_error(message)
        return code
    except (RuntimeError, MemoryError) as error:
        if limit_error(error) is None:
            raise
        code, message = describe(error)
        print_error(message)
        return code
    return EXIT_DONE


def export(
    source: str | os.PathLike[str],
    output: str | None,
    cast_dtype: str | None,
    num_procs: int,
    num_threads: int,
    *,
    quiet: bool = False,
) -> ConsolidationReport:
    """Consolidate and log to standard error; unless *quiet*, print the output directory on standard output."""
    report = consolidate(
        source, output, cast_dtype=cast_dtype, num_threads=num_threads, num_procs=num_procs, log=say
    )
    say(summary(report))
    if not quiet:
        print_path(report.output)
    return report


def summary(report: ConsolidationReport) -> str:
    """One line on what was written."""
    files = "1 file" if report.num_files == 1 else f"{report.num_files} files"
    checked = "digests checked" if report.checked else "source unchecked"
    return (
        f"wrote {report.num_tensors} tensors in {files}, "
        f"{size_text(report.nbytes)}, {report.seconds:.1f} s ({checked})"
    )


def _processes() -> int:
    text = os.environ.get("WORLD_SIZE") or os.environ.get("NPROC_PER_NODE") or "1"
    try:
        return int(text)
    except ValueError:
        raise RecipeError(
            "not a number of processes", where="NPROC_PER_NODE", value=text, hint="give 1 or more"
        ) from None


def say(text: str) -> None:
    """Log a line on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {printable(text)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
