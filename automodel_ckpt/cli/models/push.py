"""``ckpt push`` and ``ckpt pull``: copy checkpoints to and from an object store, and models to and from the Hub."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from automodel_ckpt.base.store_url import is_url
from automodel_ckpt.base.units import size_text
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.cli.common.arguments import without_effect
from automodel_ckpt.cli.common.output import print_document
from automodel_ckpt.cli.common.paths import (
    IN_THE_WAY,
    OWN_ONLY,
    download_directory,
    find_checkpoint,
)
from automodel_ckpt.cli.common.remote import locate, locate_one
from automodel_ckpt.cli.models import hub
from automodel_ckpt.errors import RecipeError, unusable

_URL = "URL of a run in a store, such as s3://BUCKET/RUN (s3, gs, az, file)"
_THREADS = """
--num-threads >=1 =8 N | number of files, and parts of large files, at the same time (default: 8)
"""
USAGE_PUSH = f"""
Upload a checkpoint with its exports to an object store, or its model to the Hugging Face Hub, where it is complete or
absent. An interrupted upload is continued. Credentials come from the environment (for the Hub, `hf auth login`).

path PATH                 | a checkpoint, a pointer, or a run (its newest checkpoint)
url URL                   | {_URL}; or hub:ORG/NAME for an export or adapter with its model card
--metric METRIC           | key in losses.json that selects LOWEST_VAL in the store (default: val_loss)
--max                     | higher values of --metric are better
--max-mb-per-second >=1 R | maximum rate, in 10^6 bytes per second
{_THREADS}{hub.PUSH_OPTIONS}
"""
USAGE_PULL = f"""
Download a checkpoint with its exports from an object store into a run directory, or a model from the Hugging Face Hub,
and verify it. It appears there when it is complete. An interrupted download from the Hub is continued. A run directory
without logs gets the run's.

url URL         | {_URL}, or a checkpoint or pointer in it; or hub:ORG/NAME@REVISION
directory ? DIR | run directory, or directory of the model (default: the last name in the URL)
--no-exports    | with a store: download the checkpoint without its exports (consolidated/, merged/)
{_THREADS}
"""


def run(arguments: Namespace) -> int:
    """Run ``ckpt push``. Raises :class:`CheckpointUnusable` for a damaged checkpoint, StoreError if the store fails."""
    from automodel_ckpt.checkpoint.remote.push import push_checkpoint, push_exports
    from automodel_ckpt.checkpoint.store.transfer import Throttle
    from automodel_ckpt.hub.repository import is_hub

    if is_hub(arguments.url):
        return hub.run_push(arguments)
    _check_is_url(arguments.url, "ckpt push")
    hub.reject_hub_options(arguments)
    checkpoint = find_checkpoint(Path(arguments.path))
    if not layout.parse_checkpoint_name(checkpoint.name):
        raise unusable(
            "only checkpoints of this program can be pushed", checkpoint, checkpoint.name, OWN_ONLY
        )
    remote, name = locate(arguments.url)
    if name is not None:
        raise RecipeError(
            "the URL of a run is needed, without the name of a checkpoint",
            "ckpt push",
            arguments.url,
        )
    rate = arguments.max_mb_per_second
    throttle = Throttle(None if rate is None else 1e6 * rate)
    memory = checkpoint.parent / f".push-{checkpoint.name}.json"
    started = time.monotonic()
    url = f"{remote.store}/{checkpoint.name}"
    options = {"throttle": throttle, "num_threads": arguments.num_threads}
    nbytes = push_checkpoint(remote, checkpoint, memory, **options)
    remote.point(arguments.metric or "val_loss", "max" if arguments.max else "min")
    nbytes += push_exports(remote, checkpoint, **options)
    seconds = time.monotonic() - started
    text = f"uploaded {url}: {size_text(nbytes)} in {seconds:.1f} s"
    if nbytes == 0:
        text = f"{url} is there already"
    document = {"url": url, "nbytes": nbytes, "seconds": seconds}
    return print_document(arguments, document, text)


def run_pull(arguments: Namespace) -> int:
    """Run ``ckpt pull``. Raises :class:`CheckpointUnusable` if there is no complete checkpoint, or if it is damaged."""
    from automodel_ckpt.hub.repository import is_hub

    if not is_hub(arguments.url):
        _check_is_url(arguments.url, "ckpt pull")
        return _pull_checkpoint(arguments)
    if arguments.no_exports:
        raise without_effect("pull", "--no-exports", True, "with a model of the Hub")
    return hub.run_pull(arguments)


def _pull_checkpoint(arguments: Namespace) -> int:
    """Download a checkpoint from a store."""
    from automodel_ckpt.checkpoint.export.export_manifest import complete_exports
    from automodel_ckpt.checkpoint.remote.pull import pull_checkpoint, pull_logs
    from automodel_ckpt.convert.publishing import held_run

    if arguments.directory is not None and is_url(arguments.directory):
        raise RecipeError(
            "the target of a download is a local directory", "ckpt pull", arguments.directory
        )
    remote, name, manifest = locate_one(arguments.url)
    directory = download_directory(arguments.directory, str(remote.store))
    if (directory / name).exists():
        raise RecipeError("a checkpoint of this name exists", directory / name, name, IN_THE_WAY)
    started = time.monotonic()
    with held_run(directory, f"downloading {name}"):
        path = pull_checkpoint(
            remote,
            name,
            directory,
            num_threads=arguments.num_threads,
            with_exports=not arguments.no_exports,
        )
        pull_logs(remote, directory)
    seconds = time.monotonic() - started
    exports = complete_exports(path)
    files = [file for export in exports for file in export.rglob("*") if file.is_file()]
    nbytes = manifest.nbytes + sum(file.stat().st_size for file in files)
    names = [str(export.relative_to(path)) for export in exports]
    with_exports = f", with {' and '.join(names)}" if names else ""
    text = f"downloaded {path}: {size_text(nbytes)} in {seconds:.1f} s, verified{with_exports}"
    document = {"path": str(path), "exports": names, "nbytes": nbytes, "seconds": seconds}
    return print_document(arguments, document, text)


def _check_is_url(text: str, where: str) -> None:
    """Raise :class:`RecipeError` for an address that is no URL, such as a name of the Hub without ``hub:``."""
    if is_url(text):
        return
    raise RecipeError(
        "this is neither the URL of a store nor a repository of the Hub",
        where,
        text,
        "use a URL such as s3://BUCKET/RUN for checkpoints, or hub:ORG/NAME for a model",
    )
