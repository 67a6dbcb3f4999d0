"""What a launcher contains of a recipe: ranks, arguments, storage, environment variables and the time of a save."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from automodel_ckpt.base.store_url import extra_of, is_url
from automodel_ckpt.cli.cluster.options import FLAG
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.overrides import CommandLine
from automodel_ckpt.config.tree.references import variables_in
from automodel_ckpt.config.tree.urls import with_local_directory
from automodel_ckpt.config.tree.yaml_tree import is_stream
from automodel_ckpt.errors import AutomodelError, RecipeError
from automodel_ckpt.logs.log_records import read_records

UNKNOWN_SECONDS = 300
_UNKNOWN_STEP_SECONDS = 30.0
_SLACK_SECONDS = 30
_MIN_SECONDS = 120
_ROUNDED_TO = 30
_NUM_SAVES = 20
_NUM_STEPS = 200


@dataclass(frozen=True, slots=True)
class StopTime:
    """*seconds* that a run needs at most from a signal to its end, and the *reason*, as a sentence."""

    seconds: int
    reason: str


def stop_time(loaded: LoadedRecipe) -> StopTime:
    """Return the time from a signal to the end of a run.

    A signal is answered after the current step. A save may have to wait for an earlier one in the background. The time
    is therefore twice the time of a step and a save, plus 30 s, and at least 120 s. If checkpoints are uploaded, it is
    also at least ``checkpoint.remote.wait_after_signal_seconds`` plus 30 s. Without a log in the run directory, it is
    300 s.
    """
    section = with_local_directory(loaded.config).checkpoint
    if not section.enabled:
        return StopTime(_MIN_SECONDS, "the run saves no checkpoints")
    least = _MIN_SECONDS
    if section.remote is not None:
        least = max(least, math.ceil(section.remote.wait_after_signal_seconds) + _SLACK_SECONDS)
    log = Path(section.checkpoint_dir) / "training.jsonl"
    measured = _measured(log)
    if measured is None:
        reason = "a guess, because no save was measured: write this launcher again after a save"
        return StopTime(_rounded(UNKNOWN_SECONDS, least), reason)
    step, save = measured
    found = f"measured: a step takes {step:.3g} s, and the longest save took {save:.3g} s ({log})"
    return StopTime(_rounded(2 * (step + save) + _SLACK_SECONDS, least), found)


def _rounded(seconds: float, least: int) -> int:
    return math.ceil(max(seconds, least) / _ROUNDED_TO) * _ROUNDED_TO


def _measured(log: Path) -> tuple[float, float] | None:
    """Return the median time of a step and the longest of the newest saves, in seconds.

    Returns None when the log has no save.
    """
    saves: list[float] = []
    times: list[tuple[int, float]] = []
    try:
        for record in read_records(log):
            seconds, timestamp = record.get("total_seconds"), record.get("timestamp")
            if record.get("event") == "save" and isinstance(seconds, int | float):
                saves.append(float(seconds))
            elif "event" not in record and isinstance(timestamp, int | float):
                times.append((record["step"], float(timestamp)))
    except AutomodelError:
        return None
    if not saves:
        return None
    steps = [
        later - earlier
        for (before, earlier), (step, later) in itertools.pairwise(times[-_NUM_STEPS:])
        if step == before + 1 and later >= earlier
    ]
    step_seconds = statistics.median(steps) if steps else _UNKNOWN_STEP_SECONDS
    return step_seconds, max(saves[-_NUM_SAVES:])


_CREDENTIALS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "azure": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
"""Variables that the client of a store reads, by the extra that installs it. Instance roles need none of them."""
_TRACKER_KEYS = {"wandb": "WANDB_API_KEY"}
_TRACKER_EXTRAS = {"tensorboard"}
"""Trackers that an extra of this package installs. The others are packages of these names."""
_NAME_LENGTH = 40
SCRATCH = "~/.cache/automodel_ckpt/runs"
"""The local directory of runs with a URL as their directory, if the recipe and the environment name no other."""


@dataclass(frozen=True)
class Job:
    """A recipe with the ranks that run it.

    *recipe* is the path of its file as given, *text* its content (None: it consists of several files), and *arguments*
    are the overrides and flags after it. *run_directory* and *remote_url* are as written, with references to
    environment variables. *has_url_directory*: the recipe's run directory is *remote_url*, and *run_directory* the
    local one with it. *variables* maps the names of those that the recipe refers to, to whether they have no default.
    *credentials* are the names of those that its store, its tracker or the Hub's client may read.
    """

    name: str
    recipe: str
    text: str | None
    arguments: tuple[str, ...]
    num_nodes: int
    ranks_per_node: int
    max_restarts: int | None
    run_name: str | None
    uses_gpus: bool
    num_workers: int
    run_directory: str
    has_url_directory: bool
    remote_url: str | None
    stop_signal: str
    stop: StopTime
    variables: Mapping[str, bool]
    credentials: tuple[str, ...]
    extras: tuple[str, ...]
    """Extras of this package that the recipe needs."""
    packages: tuple[str, ...]
    """Other packages that the recipe needs."""

    @property
    def required(self) -> tuple[str, ...]:
        """The variables that the recipe refers to without a default."""
        return tuple(name for name, is_required in self.variables.items() if is_required)

    @property
    def title(self) -> str:
        """One line: the recipe and its ranks."""
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        ranks = "1 rank" if self.ranks_per_node == 1 else f"{self.ranks_per_node} ranks"
        each = " each" if self.num_nodes > 1 else ""
        return f"Trains {self.recipe} on {nodes} with {ranks}{each}"

    @property
    def run_words(self) -> tuple[str, ...]:
        """The arguments after the recipe."""
        name = (f"--run-name={self.run_name}",) if self.run_name else ()
        return (*self.arguments, *name)

    def launch_words(self, rank: str, host: str, port: str, run_id: str) -> list[str]:
        """Return the flags that start the ranks of a node with this *rank*; node 0 is at *host* and *port*."""
        words = [f"--nproc-per-node={self.ranks_per_node}"]
        if self.max_restarts:
            words.append(f"--max-restarts={self.max_restarts}")
        if self.num_nodes > 1:
            words.append(f"--nnodes={self.num_nodes}")
            if self.max_restarts:
                words += [f"--rdzv-endpoint={host}:{port}", f"--rdzv-id={run_id}"]
            else:
                words += [f"--node-rank={rank}", f"--master-addr={host}", f"--master-port={port}"]
        return words


def describe_job(loaded: LoadedRecipe, line: CommandLine) -> Job:
    """Return what a launcher of *loaded* contains. Raises :class:`RecipeError` for a recipe from a pipe."""
    if is_stream(loaded.path):
        raise RecipeError(
            "a launcher needs a recipe file",
            where=FLAG,
            value=str(loaded.path),
            hint="write the recipe to a file",
        )
    config, flags = loaded.config, line.flags
    num_nodes = int(flags.nnodes)
    directory = _text(loaded, "checkpoint.checkpoint_dir") or "checkpoints/"
    url = _text(loaded, "checkpoint.remote.url")
    has_url_directory = is_url(directory)
    if has_url_directory:
        # Checkpoints are uploaded from a local directory.
        url, directory = directory, _text(loaded, "checkpoint.scratch_dir") or SCRATCH
    store_extra = extra_of(url) if url else ""
    trackers = set(config.logging.trackers)
    tracker_keys = [_TRACKER_KEYS[name] for name in sorted(trackers & _TRACKER_KEYS.keys())]
    # References in the file and in overrides; values are never read.
    variables = variables_in(loaded.tree)
    credentials = dict.fromkeys(("HF_TOKEN", *tracker_keys, *_CREDENTIALS.get(store_extra, ())))
    signals = [name.removeprefix("SIG") for name in config.step_scheduler.stop_signals]
    extras = {store_extra} if store_extra else set()
    return Job(
        name=_name(loaded.path),
        recipe=str(loaded.path),
        text=_recipe_text(loaded),
        arguments=tuple(_arguments(line)),
        num_nodes=num_nodes,
        ranks_per_node=int(flags.nproc_per_node),
        max_restarts=flags.max_restarts,
        run_name=flags.run_name,
        uses_gpus=config.distributed.backend != "gloo",
        num_workers=config.dataloader.num_workers,
        run_directory=directory,
        has_url_directory=has_url_directory,
        remote_url=url,
        stop_signal=next((name for name in ("USR1", *signals) if name in signals), "INT"),
        stop=stop_time(loaded),
        variables=variables,
        credentials=tuple(name for name in credentials if name not in variables),
        extras=tuple(sorted(extras | (trackers & _TRACKER_EXTRAS))),
        packages=tuple(sorted(trackers - _TRACKER_EXTRAS)),
    )


def _text(loaded: LoadedRecipe, key: str) -> str | None:
    """Return the text of a key as written, with its references. Returns None when it is null or missing."""
    node = loaded.tree.at(key)
    if node is None or node.is_null or not isinstance(node.value, str):
        return None
    return node.value


def _name(path: Path) -> str:
    """Return a name of letters, digits and dashes (RFC 1123) from the name of a recipe file."""
    words = re.sub(r"[^a-z0-9]+", "-", path.stem.lower()).strip("-")[:_NAME_LENGTH].strip("-")
    return words if words[:1].isalpha() else f"run-{words}".strip("-")


def _arguments(line: CommandLine) -> list[str]:
    """Return the overrides and flags of the command line that belong to the run, in their order."""
    words = [f"--trust={name}" for name in line.flags.trust]
    for override in line.overrides:
        if not override.is_below:
            words.append(f"--{override.key}={override.node.value}")
    return words


def _recipe_text(loaded: LoadedRecipe) -> str | None:
    """Return the text of a recipe's file. Returns None when it extends other files, or its class is in a file."""
    text = loaded.path.read_text(encoding="utf-8")
    name = _text(loaded, "recipe") or ""
    is_alone = re.search(r"^extends\s*:", text, re.MULTILINE) is None and ".py:" not in name
    return text if is_alone else None
