"""Base and adapter as one model in Hugging Face files: named, split and described as the base's.

The base is read tensor by tensor, once for its digest and once to be copied. The memory needed is four times the size
of the largest tensor. Staged and published as every export. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np

from automodel_ckpt.checkpoint.export.base_identity import (
    base_revision,
    find_base,
    identify_base,
    read_peft_record,
)
from automodel_ckpt.checkpoint.export.consolidate import ConsolidationReport, Output, consolidate
from automodel_ckpt.checkpoint.export.files import (
    Digested,
    Log,
    agreeing_config,
    cast_lines,
    check_target,
    resolved_target,
    staged,
    write_manifest,
    write_side_files,
)
from automodel_ckpt.checkpoint.export.plan import (
    OutputFile,
    Plan,
    make_plan,
    parse_cast_dtype,
)
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.durable_file import digest_of
from automodel_ckpt.checkpoint.files.safe_open import json_bytes, parse_json
from automodel_ckpt.checkpoint.files.type_aliases import AnyPath, FileDict, Values
from automodel_ckpt.checkpoint.parts.manifest import Manifest, has_manifest
from automodel_ckpt.checkpoint.parts.verify import verify
from automodel_ckpt.checkpoint.sources.model_files import (
    EMBEDDING_FILES,
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    base_files,
    fits,
    read_files,
)
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.files import read_json
from automodel_ckpt.convert.formats.hugging_face import tensors_in_file
from automodel_ckpt.convert.merging.merge_rules import (
    Naming,
)
from automodel_ckpt.convert.merging.merged_model import Adapter, MergedModel
from automodel_ckpt.errors import CheckpointUnusable, RecipeError, unusable


def merge(
    source: Path,
    output: AnyPath | None = None,
    *,
    base: str | None,
    directory_of: Callable[[str, str | None], Path | None],
    naming_of: Callable[[Path, Path | None], Naming],
    cast_dtype: str | None = None,
    cache: Path | None = None,
    log: Log,
) -> ConsolidationReport:
    """Write the base and the adapter of the checkpoint *source* (or its ``model/``) as one model to *output*.

    *output* defaults to ``merged`` in the model's directory. *base* is the name or directory of the base. None: the
    one that the checkpoint names. *directory_of* returns the directory of a base's name at a revision of the Hub, and
    *naming_of* the names of its tensors in memory, with the config that its second argument names (None: the base's
    own). Digests of the base are stored in *cache*.

    Raises :class:`CheckpointUnusable` if the checkpoint is damaged or has no adapter, if the base is not the adapter's,
    and for tensors that cannot be merged; :class:`SaveFailed` if the output cannot be written; :class:`RecipeError` for
    a wrong argument. In each case nothing was written.
    """
    started = time.monotonic()
    cast_code = parse_cast_dtype(cast_dtype)
    checkpoint, name = _checkpoint_of(source)
    target = resolved_target(output, checkpoint / name / layout.MERGED)
    check_target(target)
    manifest = Manifest.read(checkpoint)
    record = read_peft_record(
        checkpoint, name, without="leave out --merge: the model is already complete"
    )
    with _adapter(checkpoint, name, manifest) as adapter:
        base_name = base or find_base(record, checkpoint.parent)
        revision = None
        if base_name == record["base"]["name"]:
            revision = base_revision(adapter.config, adapter.directory / layout.ADAPTER_CONFIG)
        found = directory_of(base_name, revision)
        base_dir = _checked(found, base_name, record["base"], checkpoint.parent, cache)
        model = MergedModel(adapter, base_dir, naming_of(base_dir, adapter.model_config))
        plan = make_plan(model.tensors, {}, model.maps, cast_dtype=cast_code, where=str(base_dir))
        files, warnings = _side_files(adapter, base_dir, model, plan)
        for text in [f"warning: {text}" for text in warnings]:
            log(text)
        for text in [*model.notes, *cast_lines(plan.casts)]:
            log(text)
        with staged(target, log) as staging:
            parts: list[Digested] = []
            for file in plan.files:
                parts.extend(_write(file, model, staging))
            write_side_files(files, staging)
            origin = Source(checkpoint, checkpoint / name, {}, manifest=manifest)
            write_manifest(plan, origin, staging, parts)
    seconds = time.monotonic() - started
    sizes = (len(plan.files), len(model.tensors), plan.nbytes)
    return ConsolidationReport(target, *sizes, seconds, True, plan.casts, tuple(warnings))


def _checkpoint_of(source: Path) -> tuple[Path, str]:
    """Return the checkpoint that *source* is, or is a part of, and the name of the part with the adapter."""
    checkpoint, name = source, "model"
    if not has_manifest(source):
        checkpoint, name = source.parent, source.name
    if not has_manifest(checkpoint):
        raise unusable(
            "only adapters in a checkpoint of this program can be merged",
            source,
            f"no {layout.MANIFEST}",
            "import the adapter of another program with `ckpt import DIR RUN`, then merge it with "
            "`ckpt export RUN --merge`",
        )
    return checkpoint, name


def _checked(
    directory: Path | None, name: str, recorded: Values, run: Path, cache: Path | None
) -> Path:
    """Return the *directory* of the base, after its digest was compared with the *recorded* one."""
    if directory is None:
        raise RecipeError(
            "the base model is not on this machine",
            "--base",
            name,
            "load it once while there is a network, or give its directory with --base",
        )
    digest = identify_base(name, directory, run=run, cache=cache).digest
    # Shapes prove nothing: an adapter on another base loads and answers nonsense.
    if digest != recorded.get("digest"):
        raise unusable(
            "this is not the base that the adapter was trained on",
            directory,
            f"digest {digest}, not {recorded.get('digest')}",
            f"give the directory of the original {recorded.get('name')} with --base",
        )
    return directory


@contextmanager
def _adapter(checkpoint: Path, name: str, manifest: Manifest) -> Iterator[Adapter]:
    """Yield the verified adapter. If it is sharded, it is consolidated into a temporary directory."""
    with ExitStack() as stack:
        directory = checkpoint / name
        if f"{name}/{layout.ADAPTER_MODEL}" in manifest.files:
            paths = [path for path in manifest.files if path.startswith(f"{name}/")]
            files = {path: manifest.files[path] for path in paths}
            CheckpointUnusable.check(
                verify(checkpoint, dataclasses.replace(manifest, files=files), "digest")
            )
        else:
            scratch = tempfile.TemporaryDirectory(prefix="automodel_ckpt-")
            directory = Path(stack.enter_context(scratch), "adapter")
            consolidate(checkpoint / name, directory)
        tensors = tensors_in_file(directory, layout.ADAPTER_MODEL)
        config = read_json(directory, layout.ADAPTER_CONFIG)
        if config is None:
            raise unusable(
                "the description of the adapters is not there", directory, layout.ADAPTER_CONFIG
            )
        yield Adapter(directory, tensors, config)


def _side_files(
    adapter: Adapter, base_dir: Path, model: MergedModel, plan: Plan
) -> tuple[FileDict, list[str]]:
    """Return the side files of the merged model, and warnings.

    They are the base's, but the tokenizer's are the checkpoint's if it has them, and so are the files that describe how
    embeddings are computed. config.json matches the weights.
    """
    tokenizer = read_files(adapter.directory, TOKENIZER_FILES)
    of_embeddings = read_files(adapter.directory, EMBEDDING_FILES)
    files = {
        name: data
        for name, data in base_files(base_dir).items()
        if not (tokenizer and fits(name, TOKENIZER_FILES))
        and not (of_embeddings and fits(name, EMBEDDING_FILES))
    }
    path = base_dir / "config.json"
    if adapter.model_config is not None:
        path = adapter.model_config
        files["config.json"] = read_files(path.parent, [path.name])[path.name]
        # The generation config belongs to the base, which generates text.
        files.pop(GENERATION_CONFIG, None)
    config, warnings = agreeing_config(files["config.json"], plan, model.maps, path)
    files |= tokenizer | of_embeddings | read_files(adapter.directory, [GENERATION_CONFIG])
    files["config.json"] = _changed_config(config, model)
    files[layout.HF_INDEX] = plan.index()
    return files, warnings


def _changed_config(raw: bytes, model: MergedModel) -> bytes:
    """Return config.json, changed if embeddings are no longer tied or have another number of rows, or if the base was
    quantized."""
    config = parse_json(raw)
    # Models of several modalities have a config for each part, such as text_config.
    parts = [value for key, value in config.items() if key.endswith("_config")]
    before = json.dumps(config)
    if model.is_dequantized:
        del config["quantization_config"]
    for section in [config, *(part for part in parts if isinstance(part, dict))]:
        if model.untied and (section is config or "tie_word_embeddings" in section):
            section["tie_word_embeddings"] = False
        for num_rows, after in model.rows:
            if section.get("vocab_size") == num_rows:
                section["vocab_size"] = after
    if json.dumps(config) == before:
        return raw
    return json_bytes(config)


def _write(file: OutputFile, model: MergedModel, staging: Path) -> Iterator[Digested]:
    """Write a file, fsync it, and yield the digests of its parts."""
    with closing(Output(staging / file.name, file.header, file.nbytes)) as output:
        yield Digested(file.name, 0, len(file.header), digest_of(file.header))
        for tensor, at in file.placed():
            values = model.value(tensor.fqn, tensor.dtype)
            # The merged weight of a transposed layer is a view. Its bytes are not in row-major order.
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
            output.write(data, at)
            yield Digested(file.name, at, len(data), digest_of(data))
        # Before the rename that publishes: a name must not become durable before its data.
        output.sync()
