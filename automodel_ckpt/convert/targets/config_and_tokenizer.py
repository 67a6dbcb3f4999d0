"""The config.json and the tokenizer's files of a model, for exports that contain them. Imports no torch."""

from __future__ import annotations

from automodel_ckpt.checkpoint.export.files import side_files
from automodel_ckpt.checkpoint.sources.base_maps import maps_of
from automodel_ckpt.checkpoint.sources.model_files import is_tokenizer_file
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.targets.source_checks import plan_in_stored_dtypes


def config_and_tokenizer(
    source: Source, cast_code: str | None
) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Return config.json and the tokenizer's files by name, those in subdirectories excluded, and warnings.

    The dtype in the config is that of the export. Raises :class:`CheckpointUnusable` if a file cannot be read.
    """
    plan = plan_in_stored_dtypes(source, cast_code)
    beside, warnings = side_files(source, plan, maps_of(source))
    files: dict[str, bytes] = {}
    for name, content in sorted(beside.items()):
        is_wanted = name == "config.json" or is_tokenizer_file(name)
        if is_wanted and "/" not in name:
            files[name] = content
    return files, (*source.notes, *warnings)
