"""``python -m automodel_ckpt.consolidate``: NeMo AutoModel's offline tool, for ``consolidate.sh`` of every checkpoint.

The name of this module and its arguments are part of the files on disk: ``consolidate.sh`` of old checkpoints runs it.
It takes the arguments of AutoModel's tool, so that either tool can replace the other. Started by torchrun with several
processes, only rank 0 works, with as many processes. On a command line, use ``ckpt export``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from automodel_ckpt.base.terminal import print_error, require_utf8
from automodel_ckpt.cli.targets.table import export_hf
from automodel_ckpt.errors import EXIT_DONE, AutomodelError, RecipeError, describe, limit_error


def parser() -> argparse.ArgumentParser:
    """Build the parser of the tool's command line."""
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
        "--cast-dtype",
        metavar="DTYPE",
        help="cast floating-point tensors to bf16, fp16, fp32 or fp64",
    )
    result.add_argument(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="accepted for compatibility; has no effect",
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code. The output directory is the only line on standard output."""
    if argv is None:
        require_utf8()
    arguments = parser().parse_args(argv)
    if os.environ.get("RANK", "0") != "0":
        return EXIT_DONE
    try:
        export_hf(
            arguments.input_dir,
            arguments.output_dir,
            cast_dtype=arguments.cast_dtype,
            num_procs=arguments.nproc or _default_num_procs(),
            num_threads=arguments.num_threads,
        )
    except (AutomodelError, KeyboardInterrupt) as error:
        return _report_failure(error)
    except (RuntimeError, MemoryError) as error:
        if limit_error(error) is None:
            raise
        return _report_failure(error)
    return EXIT_DONE


def _report_failure(error: BaseException) -> int:
    code, message = describe(error)
    print_error(message)
    return code


def _default_num_procs() -> int:
    """Return the number of processes in the environment. Raises :class:`RecipeError` if it is not a number."""
    text = os.environ.get("WORLD_SIZE") or os.environ.get("NPROC_PER_NODE") or "1"
    try:
        return int(text)
    except ValueError:
        raise RecipeError(
            "not a number of processes", where="NPROC_PER_NODE", value=text, hint="give 1 or more"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
