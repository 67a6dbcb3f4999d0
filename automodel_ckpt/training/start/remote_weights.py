"""``init_from`` with URLs of object stores: their weights are downloaded for the start of a run."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.base.user_cache import cache_directory
from automodel_ckpt.checkpoint.remote.locate import locate_weights
from automodel_ckpt.checkpoint.remote.pull import pull_weights
from automodel_ckpt.checkpoint.run.transfer_files import DIRECTORY, options_for
from automodel_ckpt.config.keys.checkpoint import CheckpointConfig
from automodel_ckpt.config.keys.model import InitFromConfig, InitFromSource
from automodel_ckpt.parallel.ranks.agree import (
    broadcast_object,
    raise_on_all_ranks,
    while_working,
)

log = logging.getLogger("automodel_ckpt")

Section = InitFromConfig | Sequence[InitFromSource]


@contextlib.contextmanager
def with_local_weights(
    section: Section, checkpoint: CheckpointConfig, *, downloads: bool, group: ProcessGroup | None
) -> Iterator[Section]:
    """Yield the section ``init_from`` with paths in place of URLs. Collective.

    A rank that *downloads* copies the weights into the run directory, or without checkpoints into the user's cache:
    rank 0, and one rank of each further node if the ranks there do not see that directory of rank 0. The copies are
    removed at the end of the context. Raises, the same on all ranks, :class:`CheckpointUnusable` for a URL without
    weights, :class:`SaveFailed` without space, and :class:`StoreError`.
    """
    sources = [section] if isinstance(section, InitFromConfig) else section
    urls = [one.path for one in sources if is_url(one.path)]
    if not urls:
        yield section
        return
    parent = cache_directory()
    if checkpoint.enabled:
        parent = Path(checkpoint.checkpoint_dir).absolute()
    paths: dict[str, str] = {}
    failure: Exception | None = None
    stopping = threading.Event()
    # The same on all nodes.
    name = broadcast_object(group, f"init_from-{uuid.uuid4().hex}")
    directory = parent / DIRECTORY / name

    def download() -> None:
        nonlocal failure
        if not downloads:
            return
        try:
            directory.mkdir(parents=True)
            for number, url in enumerate(dict.fromkeys(urls)):
                paths[url] = str(_download(url, checkpoint, directory / str(number), stopping))
        except Exception as error:  # raised below, on all ranks
            failure = error

    try:
        # A download may take longer than the timeout of the group.
        while_working(group, download, cancel=stopping.set)
        with raise_on_all_ranks(group):
            if failure is not None:
                raise failure
        local = broadcast_object(group, paths)
        found: Any = [replace(one, path=local.get(one.path, one.path)) for one in sources]
        yield found[0] if isinstance(section, InitFromConfig) else found
    finally:
        if downloads:
            shutil.rmtree(directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                # Unless the start has fetched a checkpoint, too.
                (parent / DIRECTORY).rmdir()


def _download(
    url: str, checkpoint: CheckpointConfig, target: Path, stopping: threading.Event
) -> Path:
    options = options_for(url, checkpoint.remote)
    run, name = locate_weights(url, options, where="init_from.path")
    target.mkdir()
    log.info("downloading the weights of %s", f"{run.store}/{name}" if name else run.store)
    num_threads = 8 if checkpoint.remote is None else checkpoint.remote.num_threads
    return pull_weights(run, name, target, num_threads=num_threads, stopping=stopping)
