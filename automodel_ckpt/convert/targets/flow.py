"""What every export does: open and check the source, plan, log, publish, report. A target adds what it writes.

Imports no torch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from automodel_ckpt.checkpoint.export.files import Log, cast_lines, side_files
from automodel_ckpt.checkpoint.export.plan import Plan, export_names, make_plan, parse_cast_dtype
from automodel_ckpt.checkpoint.files.safe_open import without_links
from automodel_ckpt.checkpoint.files.type_aliases import AnyPath, FileDict, Strings, Values
from automodel_ckpt.checkpoint.options import Level
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.sources.model_files import TOKENIZER_FILES, fits
from automodel_ckpt.checkpoint.sources.source import maps_of
from automodel_ckpt.convert.open import open_source
from automodel_ckpt.convert.publishing import (
    check_directory_target,
    check_file_target,
    published_directory,
    published_file,
)
from automodel_ckpt.errors import CheckpointUnusable, Problem, unusable

LOG: Log = logging.getLogger("automodel_ckpt").info
_ROOT = Path("/")
_CONFIG = "config.json"
_LANGUAGE_MODEL = "ForCausalLM"
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ExportReport:
    """An export that was published at *output*: *nbytes* bytes, in *seconds*.

    *checked* states whether the digests of the source were known, and so compared. *warnings* were logged. *details*
    are what a target has to report in addition, and *summary* are some of them in words.
    """

    output: Path
    num_tensors: int
    nbytes: int
    seconds: float
    checked: bool
    warnings: Strings
    details: Values = field(default_factory=dict)
    summary: str = ""


class Export:
    """An export of *source*, which is anything that ``open_source`` of ``convert/open.py`` accepts, to *output*.

    Raises :class:`RecipeError` for another *cast_dtype* than bf16, fp16, fp32 and fp64, and :class:`CheckpointUnusable`
    if there is no model in *source*.
    """

    def __init__(
        self,
        source: AnyPath,
        output: AnyPath | None = None,
        *,
        cast_dtype: str | None = None,
        overwrite: bool = False,
        log: Log = LOG,
    ) -> None:
        self._started = time.monotonic()
        self._output = output
        self._overwrite = overwrite
        self.cast_code = parse_cast_dtype(cast_dtype)
        self.source = open_source(Path(source))
        self.where = str(self.source.model_directory)
        self.target = Path()
        """The path to publish, which :meth:`file` or :meth:`directory` selects."""
        self.log = log
        self.warnings: list[str] = []
        self._is_checked = self.source.has_digests

    def file(self, suffix: str) -> None:
        """Publish a file: the given output, or the source's name with *suffix*, next to it.

        Raises :class:`SaveFailed` if there is something that may not be replaced.
        """
        self._select(suffix)
        check_file_target(self.target, overwrite=self._overwrite)

    def directory(self, suffix: str, name: str | None = None) -> None:
        """Publish a directory, as :meth:`file`; *name* replaces the source's name. Raises :class:`SaveFailed` if it is
        not empty."""
        self._select(suffix, name)
        check_directory_target(self.target)

    def _select(self, suffix: str, name: str | None = None) -> None:
        # If a format's files can be in several places, it describes them relative to the root of the file system.
        source = self.source
        path = source.model_directory if source.root == _ROOT else source.root
        # Publishing renames: with a link, it would replace the link instead of its target.
        self.target = without_links(self._output or path.with_name((name or path.name) + suffix))
        self.warn(*source.warnings)

    def check(self, *, reads_parts: bool = False, num_threads: int = 5) -> None:
        """Raise :class:`CheckpointUnusable` for damaged files, and if a tensor of the model is missing or left over.

        Exports that read whole tensors compare their digests then: here, files of a checkpoint are only compared in
        size. With *reads_parts*, all digests are compared, because only a whole slice has one.
        """
        source = self.source
        export_names(source.tensors, source.tied, maps_of(source), self.where)
        problems: list[Problem] = []
        if source.manifest is not None:
            # Tensors of Hugging Face files are read from headers, without digests.
            level: Level = "digest" if reads_parts or source.finished else "size"
            problems = verify(source.root, source.manifest, level, num_threads=num_threads)
        elif source.export is not None and reads_parts:
            problems = source.export.problems(only=set(source.files))
        CheckpointUnusable.check(problems)

    def plan(self, cast_code: str | None = None) -> Plan:
        """Plan tensors in the dtypes of the checkpoint, not of its base, unless they are cast.

        Raises :class:`CheckpointUnusable` if the tensors do not match the model.
        """
        source = self.source
        maps = replace(maps_of(source), dtype=None)
        cast_dtype = cast_code or self.cast_code
        return make_plan(source.tensors, source.tied, maps, cast_dtype=cast_dtype, where=self.where)

    def side_files(self, plan: Plan) -> tuple[FileDict, list[str]]:
        """Return the files next to the weights, with the dtype of the export in config.json, and warnings."""
        return side_files(self.source, plan, maps_of(self.source))

    def config_and_tokenizer(self, cast_code: str | None) -> FileDict:
        """Return config.json and the tokenizer's files by name, without those in subdirectories, and log warnings."""
        beside, warnings = self.side_files(self.plan(cast_code))
        self.warn(*warnings)
        return {
            name: content
            for name, content in sorted(beside.items())
            if (name == _CONFIG or fits(name, TOKENIZER_FILES)) and "/" not in name
        }

    def required_config(self, what: str) -> Path:
        """Return the directory with the model's config.json. Raises :class:`CheckpointUnusable` if there is none."""
        side = self.source.config_directory
        if not (side / _CONFIG).is_file():
            raise unusable(
                f"{what} needs the model's config.json",
                side,
                "no such file",
                "put the file there, or export Hugging Face files (--to hf)",
            )
        return side

    def check_language_model(self, config: Values, program: str) -> None:
        """Raise :class:`CheckpointUnusable` if the model with this config.json is no causal language model: *program*
        has no others."""
        architecture = next(iter(config.get("architectures") or ()), "")
        names = {*self.source.tensors, *self.source.tied}
        has_head = _HEAD in names or config.get("tie_word_embeddings") is True
        if architecture and not architecture.endswith(_LANGUAGE_MODEL):
            value = str(architecture)[:100]
        elif not has_head:
            value = f"no {_HEAD}, and config.json does not tie it to the embedding"
        else:
            return
        raise unusable(
            f"only causal language models are exported for {program}",
            self.where,
            value,
            "export Hugging Face files (--to hf), which have every kind of model",
        )

    def warn(self, *texts: str) -> None:
        """Log warnings, which the report repeats."""
        self.warnings += texts
        for text in texts:
            self.log(f"warning: {text}")

    def log_casts(self, casts: Mapping[tuple[str, str], int] | Iterable[tuple[str, str]]) -> None:
        """Log the casts of tensors, counted by (from, to)."""
        for text in cast_lines(Counter(casts)):
            self.log(text)

    @contextmanager
    def published(self, what: str) -> Iterator[BinaryIO]:
        """Yield an empty file, open for reading and writing, that becomes the target when the block ends."""
        with published_file(self.target, self.log, what=what) as path, open(path, "r+b") as file:
            yield file

    def published_directory(self) -> AbstractContextManager[Path]:
        """Return a directory that becomes the target when the block ends."""
        return published_directory(self.target, self.log)

    def report(self, num_tensors: int, summary: str = "", **details: Any) -> ExportReport:
        """Return the report of what was published."""
        target = self.target
        paths = [target] if target.is_file() else target.rglob("*")
        nbytes = sum(path.stat().st_size for path in paths if path.is_file())
        seconds = time.monotonic() - self._started
        warnings = tuple(dict.fromkeys(self.warnings))
        return ExportReport(
            target, num_tensors, nbytes, seconds, self._is_checked, warnings, details, summary
        )


# The values of ``ckpt export --to`` except hf, and their modules here, each with a function ``write``.
_MODULES = {
    "gguf": "gguf",
    "torch": "torch_file",
    "lightning": "lightning",
    "trainer": "trainer",
    "dcp": "dcp",
    "compressed-tensors": "compressed_tensors",
    "nemo": "nemo",
    "megatron": "megatron",
    "qnemo": "tensorrt_llm",
    "onnx": "onnx",
}


def export_to(
    target: str,
    source: AnyPath,
    output: AnyPath | None = None,
    *,
    cast_dtype: str | None = None,
    overwrite: bool = False,
    log: Log = LOG,
    **options: Any,
) -> ExportReport:
    """Write the model in *source* in the format *target*, with the *options* of its function ``write``.

    Args:
        target: A value of ``ckpt export --to``, except hf.
        source: Anything that ``open_source`` of ``convert/open.py`` accepts.
        output: The path to write, by default next to *source*.
        cast_dtype: The dtype of floating-point tensors (bf16, fp16, fp32, fp64), by default the checkpoint's dtype.
        overwrite: Whether a file may be replaced.
        log: Called with each warning and cast.

    Raises:
        CheckpointUnusable: The source is damaged, or the target cannot represent its model.
        SaveFailed: The output cannot be written.
        RecipeError: An argument is wrong, or a library is missing. In each case nothing was written.
    """
    module = import_module(f"automodel_ckpt.convert.targets.{_MODULES[target]}")
    export = Export(source, output, cast_dtype=cast_dtype, overwrite=overwrite, log=log)
    report: ExportReport = module.write(export, **options)
    return report
