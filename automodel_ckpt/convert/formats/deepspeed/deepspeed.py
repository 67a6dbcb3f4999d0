"""Weights in checkpoints of DeepSpeed: ZeRO stages 1, 2 and 3, the weights of stage 0, and universal checkpoints.

A run's directory has the file ``latest``, which names the directory of the newest save (its tag). With ZeRO, the
float32 master weights are in the ranks' files of optimizer states (source: deepspeed/utils/zero_to_fp32.py, 0.19):

* Stages 1 and 2: the parameters of a group are concatenated in the order of ``param_shapes``, padded at the end, and
  each rank has a range of the result.
* Stage 3: every parameter is padded and divided among the ranks, and each rank has the concatenation of its parts.

Everything else of the model is in the files of model states: buffers, frozen parameters, names of tied parameters, and
the weights in the dtype that computed them, which are used without files of optimizer states. DeepSpeed's conversion
to a universal checkpoint writes a directory ``zero/`` with a file for each parameter.
"""

from __future__ import annotations

from pathlib import Path

from automodel_ckpt.checkpoint.files.safe_open import read_safely
from automodel_ckpt.checkpoint.sources.source import Source, unusable
from automodel_ckpt.convert.formats.deepspeed.deepspeed_files import is_tag_directory
from automodel_ckpt.convert.formats.deepspeed.deepspeed_model import describe_model
from automodel_ckpt.convert.formats.deepspeed.deepspeed_states import counters_of, model_states
from automodel_ckpt.convert.formats.files import names_in
from automodel_ckpt.convert.formats.format import Counters, Format
from automodel_ckpt.errors import CheckpointUnusable

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
_MAX_TAG_BYTES = 1024


class DeepSpeed(Format):
    """A run of DeepSpeed (``latest`` and the directories of tags), or the directory of one tag."""

    name = "DeepSpeed"
    has_own_names = True

    def detect(self, path: Path, *, follow_links: bool = False) -> bool:
        names = names_in(path)
        if LATEST not in names and LATEST_UNIVERSAL not in names:
            return is_tag_directory(path)
        return is_tag_directory(path) or any(
            is_tag_directory(path / name) for name in names if not (path / name).is_symlink()
        )

    def open(self, path: Path, *, follow_links: bool = False) -> Source:
        """Describe the model. Links are never followed: DeepSpeed writes all files to one directory."""
        tag = _tag_directory(path)
        side_files = path if (path / "config.json").is_file() else None
        return describe_model(tag).source(tag, path, side_files)

    def counters(self, path: Path) -> Counters:
        return counters_of(model_states(_tag_directory(path)))

    def training_left(self, path: Path) -> str:
        return "only the weights of DeepSpeed's files are read"

    def parts(self, path: Path) -> frozenset[str]:
        try:
            tag = _tag_directory(path)
        except CheckpointUnusable:
            return frozenset()
        return frozenset() if tag == path else frozenset({tag.name})


def _tag_directory(path: Path) -> Path:
    """Return the directory of the save that *path* is, or that its file ``latest`` names."""
    if is_tag_directory(path):
        return path
    names = names_in(path)
    pointer = LATEST if LATEST in names else LATEST_UNIVERSAL
    try:
        tag = read_safely(path, pointer, limit=_MAX_TAG_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise unusable("this file cannot be read", path / pointer, repr(error)[:200]) from error
    # The tag is a name in this directory. Nothing outside of it is read.
    if not tag.isprintable() or "/" in tag or tag in ("", ".", ".."):
        raise unusable("this file does not name a directory beside it", path / pointer, tag[:200])
    directory = path / tag
    if directory.is_symlink() or not is_tag_directory(directory):
        raise CheckpointUnusable(
            "the directory that this file names has no files of DeepSpeed",
            where=str(path / pointer),
            value=tag,
            hint="name the directory of another save, for example global_step100",
        )
    return directory
