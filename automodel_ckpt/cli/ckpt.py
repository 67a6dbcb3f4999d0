"""``ckpt``: look after checkpoints. Runs on CPU, without a network, from any directory, and without torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from automodel_ckpt import __version__
from automodel_ckpt.cli.commands import (
    completion,
    diff,
    export,
    import_,
    ls,
    maintenance,
    plot,
    show,
    track,
)
from automodel_ckpt.cli.paths import WHERE, find_checkpoint
from automodel_ckpt.cli.terminal import (
    leave_reader,
    occupy_standard_streams,
    print_error,
    problem_json,
)
from automodel_ckpt.errors import (
    EXIT_DONE,
    AutomodelError,
    CheckpointUnusable,
    RecipeError,
    SaveFailed,
    describe,
    limit_error,
    os_problem,
)


class _Parser(argparse.ArgumentParser):
    """One whose mistakes are errors like any other."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(
            message, where=self.prog, value="", hint=f"`{self.prog} --help` lists the arguments"
        )


def parser() -> argparse.ArgumentParser:
    """The command line of ``ckpt``."""
    result = _Parser(prog="ckpt", description="Inspect, verify, convert and manage checkpoints.")
    result.add_argument("--version", action="version", version=f"automodel_ckpt {__version__}")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    consolidate = commands.add_parser(
        "consolidate",
        help="export a checkpoint to Hugging Face files",
        description="Export the model of a checkpoint to Hugging Face files, and verify its digests.",
    )
    consolidate.add_argument(
        "path",
        metavar="DIR",
        help=f"{WHERE}, its model/ directory, or a directory of shards without a manifest",
    )
    consolidate.add_argument(
        "--output",
        "-o",
        metavar="OUT",
        help="output directory (default: consolidated/ in the model's directory)",
    )
    consolidate.add_argument(
        "--cast-dtype", metavar="T", help="cast floating-point tensors to bf16, fp16, fp32 or fp64"
    )
    consolidate.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="number of processes (default: 1)"
    )
    consolidate.add_argument(
        "--num-threads", type=int, default=5, metavar="N", help="threads per process (default: 5)"
    )
    own = (
        ls.add_parser(commands),
        show.add_parser(commands),
        consolidate,
        export.add_parser(commands),
        import_.add_parser(commands),
        diff.add_parser(commands),
    )
    curves = (plot.add_parser(commands), track.add_parser(commands))
    for command in (*own, *maintenance.add_parsers(commands), *curves):
        command.add_argument("--json", action="store_true", help="print JSON")
    completion.add_parser(commands)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ckpt``; returns its exit code."""
    occupy_standard_streams()
    words = sys.argv[1:] if argv is None else [*argv]
    arguments = argparse.Namespace(command="", json="--json" in words)
    try:
        arguments = parser().parse_args(words)
        code = _COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        leave_reader()
        return EXIT_DONE
    except (AutomodelError, OSError, KeyboardInterrupt) as error:
        limit = limit_error(error) if isinstance(error, OSError) else None
        return _failed(limit or error, arguments)
    except (RuntimeError, MemoryError) as error:
        limit = limit_error(error)
        if limit is None:
            raise
        return _failed(limit, arguments)


def _failed(error: BaseException, arguments: argparse.Namespace) -> int:
    """Say what is wrong, with ``--json`` also as a document; returns the exit code."""
    if isinstance(error, OSError):
        problem = os_problem(
            error,
            "cannot access a file or directory",
            hint="check the path, its permissions and the free space",
        )
        error = (SaveFailed if arguments.command in _WRITING else CheckpointUnusable).all_of(
            [problem]
        )
    code, message = describe(error)
    print_error(message)
    if getattr(arguments, "json", False) and isinstance(error, AutomodelError):
        problems = [problem_json(problem) for problem in error.problems]
        print(json.dumps({"error": {"code": code, "problems": problems}}))
    return code


def _consolidate(arguments: argparse.Namespace) -> int:
    from automodel_ckpt.cli.commands.consolidate import export as run

    report = run(
        find_checkpoint(Path(arguments.path)),
        arguments.output,
        arguments.cast_dtype,
        arguments.nproc,
        arguments.num_threads,
        quiet=arguments.json,
    )
    if arguments.json:
        print(json.dumps(export.report_hf(report), indent=2))
    return EXIT_DONE


_WRITING = frozenset({"consolidate", "export", "import", "prune", "pin", "unpin", "plot", "track"})
_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "ls": ls.ls,
    "show": show.show,
    "consolidate": _consolidate,
    "diff": diff.diff,
    "export": export.export,
    "import": import_.import_,
    "verify": maintenance.verify,
    "prune": maintenance.prune,
    "pin": maintenance.pin,
    "unpin": maintenance.pin,
    "track": track.track,
    "plot": plot.plot,
    "completion": lambda arguments: completion.completion(arguments.shell, parser()),
}

if __name__ == "__main__":
    sys.exit(main())
