"""Find the run and the checkpoint that a URL names."""

from __future__ import annotations

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.type_aliases import Values
from automodel_ckpt.checkpoint.remote.run import RemoteRun
from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import CheckpointUnusable, unusable

_NONE: Values = {}


def locate_run(
    url: str, options: Values = _NONE, *, where: str = "URL"
) -> tuple[RemoteRun, str | None]:
    """Open the run that *url* is, or is inside of, and return the name of the checkpoint that it names, if any.

    A pointer, such as ``s3://bucket/run/LATEST``, names its target. *options* are the store's options, and *where* is
    the key or argument that has the URL. Raises :class:`RecipeError` for a URL that cannot be used, and
    :class:`CheckpointUnusable` for a pointer without a target.
    """
    parent, _, last = url.rstrip("/").rpartition("/")
    is_inside = last in layout.POINTERS or layout.parse_checkpoint_name(last) is not None
    run = RemoteRun(Store(parent if is_inside else url, options, where=where))
    if last not in layout.POINTERS:
        return run, last if is_inside else None
    target = run.pointed(last)
    if target is None:
        raise _missing(str(run.store), f"no valid {last}")
    return run, target


def locate_checkpoint(
    url: str, options: Values = _NONE, *, where: str = "URL"
) -> tuple[RemoteRun, str]:
    """Open the checkpoint that *url* names; of a run, its newest one. Arguments and errors as of :func:`locate_run`.

    Raises :class:`CheckpointUnusable` if a run has no complete checkpoint.
    """
    run, name = locate_run(url, options, where=where)
    if name is None:
        newest = run.newest()
        if newest is None:
            raise _missing(str(run.store), "no complete checkpoint")
        name = str(newest.name)
    return run, name


def _missing(where: str, value: str) -> CheckpointUnusable:
    return unusable("checkpoint not found", where, value, "`ckpt ls URL` lists the checkpoints")
