"""``ckpt track``: send a run's log to a tracker afterwards, or again."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from automodel_ckpt.cli.places import run_around
from automodel_ckpt.cli.terminal import print_error, printable
from automodel_ckpt.errors import EXIT_DONE, EXIT_INTERNAL, RecipeError
from automodel_ckpt.report.trackers import TRACKERS


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command to ``ckpt``'s."""
    track: argparse.ArgumentParser = commands.add_parser(
        "track",
        help="send a run's log to a tracker",
        description="Send what a tracker does not have yet of a run's log: losses, gradient norm, learning rate, "
        "throughput, saves. In training, logging.trackers does it.",
    )
    track.add_argument("path", nargs="?", default=".", metavar="RUN", help="a run, or something in it (default: here)")
    track.add_argument(
        "--to", choices=tuple(TRACKERS), required=True, help="the tracker; its library has to be installed"
    )
    track.add_argument("--again", action="store_true", help="send all of it, also what was sent before")
    track.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the tracker's own, as project=x",
    )
    return track


def track(arguments: argparse.Namespace) -> int:
    """Run the command. Exit code 1 where the tracker failed."""
    from automodel_ckpt.report.follow import Follower, holding
    from automodel_ckpt.report.history import read_history

    run = run_around(Path(arguments.path)) or Path(arguments.path)
    last = max(read_history(run).series["loss"].steps, default=0)
    if importlib.util.find_spec(arguments.to) is None:
        raise RecipeError(
            "the tracker's library is not installed", where="--to", value=arguments.to,
            remedy=f"pip install {arguments.to}",
        )  # fmt: skip
    failures: list[str] = []
    options, after = _options(arguments.option), 0 if arguments.again else None
    with holding(run, wait=False) as is_held:
        if not is_held:
            raise RecipeError(
                "another process sends this run's log", where="ckpt track", value=str(run),
                remedy="wait for it; while the run trains, logging.trackers of its recipe does it",
            )  # fmt: skip
        Follower(run, {arguments.to: options}, after, failures.append).close()
    if failures:
        print_error("\n".join(failures))
    elif arguments.json:
        print(json.dumps({"path": str(run), "tracker": arguments.to, "step": last}))
    else:
        print(printable(f"{arguments.to} has {run} up to step {last}"))
    return EXIT_INTERNAL if failures else EXIT_DONE


def _options(words: list[str]) -> dict[str, Any]:
    from automodel_ckpt.config.convert import untyped

    for word in words:
        if "=" not in word:
            raise RecipeError(
                "an option needs a key and a value", where="--option", value=word, remedy="write it as KEY=VALUE"
            )
    return {key: untyped(value) for key, _, value in (word.partition("=") for word in words)}
