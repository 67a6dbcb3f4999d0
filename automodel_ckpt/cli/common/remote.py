"""Checkpoints in object stores, for the commands that accept a URL in place of a path."""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from automodel_ckpt.base.store_url import is_store_url, public
from automodel_ckpt.errors import Problem, RecipeError

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.parts.manifest import Manifest
    from automodel_ckpt.checkpoint.remote.run import RemoteRun

T = TypeVar("T")
V = TypeVar("V")

_HINT = "use another checkpoint of this run, or push it again"
# Names of files that are read whole to show or compare checkpoints.
_CONFIGS = ("config.yaml", "config.json", "adapter_config.json", "model_config.json")
# Attributes with a state that is read to show or compare checkpoints; of one with a file per rank, the first file.
_STATE = ("step_scheduler", "dataloader")
# Arguments that are no paths of checkpoints.
_TEXTS = frozenset({"prompt", "url", "directory"})
_NUM_THREADS = 8


def locate(url: str) -> tuple[RemoteRun, str | None]:
    """Open the run that *url* is, or is inside of, and return the name of the checkpoint that it names, if any.

    A pointer, such as ``s3://bucket/run/LATEST``, names its target. Raises :class:`RecipeError` for a URL that cannot
    be used, and :class:`CheckpointUnusable` for a pointer without a target.
    """
    from automodel_ckpt.checkpoint.remote.locate import locate_run

    return locate_run(url)


def locate_one(url: str) -> tuple[RemoteRun, str, Manifest]:
    """Open the checkpoint that *url* names; of a run, its newest one. Return its run, its name and its manifest.

    Raises as :func:`locate`, and :class:`CheckpointUnusable` if there is none, or its manifest is damaged.
    """
    from automodel_ckpt.checkpoint.remote.locate import locate_checkpoint

    run, name = locate_checkpoint(url)
    return run, name, run.complete_manifest(name)[1]


def reject_urls(arguments: Namespace) -> None:
    """Raise :class:`RecipeError` if a path on the command line is the URL of a store: the command needs a local one."""
    for name, value in vars(arguments).items():
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if name not in _TEXTS and isinstance(text, str) and is_store_url(text):
                reject_url(text, arguments.command)


def reject_url(url: str, command: str) -> None:
    """Raise :class:`RecipeError`: *command* needs a local checkpoint, and not that at *url*."""
    shown = public(url)
    raise RecipeError(
        f"`ckpt {command}` needs a local checkpoint",
        f"ckpt {command}",
        shown,
        f"download it with `ckpt pull {shown} DIR`, or what another program wrote with the tools of its store",
    )


def in_parallel(function: Callable[[T], V], items: list[T]) -> list[V]:
    """Call *function* with each of *items*, several at the same time: each call waits for a store."""
    with ThreadPoolExecutor(_NUM_THREADS, "read") as pool:
        return list(pool.map(function, items))


def remote_problems(run: RemoteRun, name: str, manifest: Manifest, *, deep: bool) -> list[Problem]:
    """Return the problems of a checkpoint's files in a store; empty if there are none.

    Every file has to be there with its size. With *deep*, all files are read, and compared with their digests; nothing
    is stored on this machine.
    """
    from automodel_ckpt.checkpoint.remote.deep_verification import digest_problems

    problems = []
    intact = []
    sizes = run.store.sizes(name)
    for file, record in manifest.files.items():
        where = f"{run.store}/{name}/{file}"
        size = sizes.get(file)
        if size is None:
            problems.append(Problem("a file of the checkpoint is missing", where, "", _HINT))
        elif size != record.size:
            problems.append(
                Problem(
                    "a file of the checkpoint has another size",
                    where,
                    f"{size} bytes, {record.size} when it was saved",
                    _HINT,
                )
            )
        else:
            intact.append(file)
    if deep:
        problems += digest_problems(run, name, manifest, intact)
    return problems


@contextmanager
def sparse_copy(run: RemoteRun, name: str, manifest: Manifest) -> Iterator[Path]:
    """Yield a temporary directory that looks like the checkpoint, without the bytes of its tensors.

    Its files have their sizes, and the content that commands show: the recipe, the configs of models, the position in
    the data, and the options of optimizers. Values in files with tensors are read by byte ranges, and verified.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-") as directory:
        root = Path(directory) / name
        for file, record in manifest.files.items():
            path = root / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, record.size)
        files = _shown_files(manifest)
        contents = in_parallel(lambda file: run.store.read(f"{name}/{file}"), files)
        for file, content in zip(files, contents, strict=True):
            (root / file).write_bytes(content)
        _copy_values(run, name, manifest, root)
        yield root


def _shown_files(manifest: Manifest) -> list[str]:
    files = [file for file in manifest.files if file.rpartition("/")[2] in _CONFIGS]
    for attribute in _STATE:
        record = manifest.state.get(attribute)
        if record is not None:
            files += record.files[:1]
    return files


def _copy_values(run: RemoteRun, name: str, manifest: Manifest, root: Path) -> None:
    """Write the values that are no tensors into the files below *root*."""
    from automodel_ckpt.checkpoint.store.ranges import VerifiedRanges

    blobs = [blob for tree in manifest.trees.values() for blob in tree.objects.values()]
    blobs.sort(key=lambda blob: (blob.file, blob.start))
    with closing(VerifiedRanges(run.store, name, manifest.trees.values())) as ranges:
        ranges.expect((blob.file, blob.start, blob.start + blob.nbytes) for blob in blobs)
        for blob in blobs:
            content = bytearray(blob.nbytes)
            ranges.read(blob.file, memoryview(content), blob.start)
            with (root / blob.file).open("r+b") as file:
                os.pwrite(file.fileno(), content, blob.start)
