"""What a launcher contains of a recipe (ranks, storage, environment variables), and the text of launchers."""

from __future__ import annotations

import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from automodel_ckpt.base.store_url import extra_of, is_url
from automodel_ckpt.base.units import counted
from automodel_ckpt.cli.cluster.options import FLAG
from automodel_ckpt.config.keys.checkpoint import RemoteConfig
from automodel_ckpt.config.load import LoadedRecipe
from automodel_ckpt.config.overrides import CommandLine
from automodel_ckpt.config.tree.references import variables_in
from automodel_ckpt.config.tree.yaml_tree import is_stream
from automodel_ckpt.errors import RecipeError, printable, without_hidden

SAVE_SECONDS = 300
"""Seconds from a signal to the end of a run: the current step, and a save."""
_SLACK_SECONDS = 30
_ROUNDED_TO = 30
_WIDTH = 118


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
    stop_seconds: int
    """The time from a signal to the end of the run."""
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
        each = " each" if self.num_nodes > 1 else ""
        ranks = counted(self.ranks_per_node, "rank")
        return f"Trains {self.recipe} on {counted(self.num_nodes, 'node')} with {ranks}{each}"

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
        stop_seconds=_stop_seconds(config.checkpoint.remote),
        variables=variables,
        credentials=tuple(name for name in credentials if name not in variables),
        extras=tuple(sorted(extras | (trackers & _TRACKER_EXTRAS))),
        packages=tuple(sorted(trackers - _TRACKER_EXTRAS)),
    )


def _stop_seconds(remote: RemoteConfig | None) -> int:
    """Return the time from a signal to the end of a run, which may wait for its uploads."""
    seconds = float(SAVE_SECONDS)
    if remote is not None:
        seconds = max(seconds, remote.wait_after_signal_seconds + _SLACK_SECONDS)
    return math.ceil(seconds / _ROUNDED_TO) * _ROUNDED_TO


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


# ---------------------------------------------------------------- YAML documents, comments, and words for bash


def filled(template: str, **values: Any) -> dict[str, Any]:
    """Return the mapping of a YAML template, with one of *values* in the place of each text ``$name``."""

    def fill(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: fill(item) for key, item in node.items()}
        if isinstance(node, list):
            return [fill(item) for item in node]
        is_name = isinstance(node, str) and node.startswith("$")
        return values[node[1:]] if is_name else node

    document: dict[str, Any] = fill(yaml.safe_load(template))
    return document


def documents(comments: str, *parts: dict[str, Any]) -> str:
    """Return YAML documents after comments."""
    return comments + "---\n".join(map(_yaml, parts))


def _yaml(part: dict[str, Any]) -> str:
    """Return a document in which all characters that are not ASCII are escaped.

    Readers of YAML differ in which of them end a line.
    """
    text: str = yaml.dump(part, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=False)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no references between parts of a document."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _block)


def comments(template: str, **values: Any) -> str:
    """Return each line of a template, filled with *values*, as wrapped comment lines.

    A line that begins with spaces is a command and is not wrapped.
    """
    lines = []
    # Filled after it is divided: a line break in a value must not end a comment.
    for line in template.splitlines():
        text = printable(without_hidden(line.format(**values)))
        wrapped = textwrap.wrap(
            text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        lines += [text] if text.startswith(" ") else wrapped or [""]
    return "".join(f"{f'# {line}'.rstrip()}\n" for line in lines)


def shell_words(words: Iterable[str]) -> str:
    """Return words for bash. Characters that are not printable are escaped, so that no reader takes one for a break."""
    return " ".join(shlex.quote(word) if word.isprintable() else _escaped(word) for word in words)


def _escaped(word: str) -> str:
    characters = []
    for character in word:
        if character.isprintable() and character not in "'\\":
            characters.append(character)
        else:
            encoded = character.encode("utf-8", "surrogateescape")
            characters += [f"\\x{byte:02x}" for byte in encoded]
    return f"$'{''.join(characters)}'"
