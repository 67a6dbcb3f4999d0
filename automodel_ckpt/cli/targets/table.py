"""The values of ``ckpt export --to``: a row for each. Imports no torch.

The options of a row become keyword arguments of the target's function ``write`` in ``convert/targets/``, and *supplied*
adds others. A new target is a row here, and a module in ``convert/targets/flow.py``.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from automodel_ckpt.base.terminal import print_path
from automodel_ckpt.base.units import counted, size_text
from automodel_ckpt.checkpoint.files.type_aliases import AnyPath, Strings, ValueDict, Values
from automodel_ckpt.cli.common.arguments import options_in, without_effect
from automodel_ckpt.errors import RecipeError, printable

if TYPE_CHECKING:
    from automodel_ckpt.checkpoint.export.consolidate import ConsolidationReport

OPTIONS = """
--cast-dtype T     | cast floating-point tensors to bf16, fp16, fp32 or fp64 (gguf and compressed-tensors: not fp64)
--nproc int =1 N   | number of processes (default: 1)
--num-threads int =5 N | threads per process (default: 5)
--merge            | merge the adapter into its base model (default of OUT: merged/ in the model's directory)
--base BASE        | with --merge: directory of the base model, if it was moved
--type to:tensor_type KIND | type of the tensors: F32, F16, BF16, Q8_0, Q5_1, Q5_0, Q4_1 or Q4_0 (default: as stored)
--force to:overwrite | overwrite an existing file
--prefix P         | prefix of all names in the state dict (default for lightning: model.)
--callback repeat to:callbacks CLASS | class of a callback with state (ExportableState) that the Trainer will have;
  repeat for several. EarlyStoppingCallback is always among them
--names {torchtitan} | names of the tensors of a Llama: those that torchtitan loads (default: those of Hugging Face)
--scheme S         | W8A8 (int8), W8A16 or W4A16 (integers, a scale per 128 columns), or FP8_DYNAMIC
--model-config path YAML | config of the NeMo class, to which references to the tokenizer's files are added
--target to:model_class CLASS | the NeMo class, as the key `target` of the config (default: none; NeMo 3 rejects
  classes of other packages)
--megatron-names   | write the tensors and the config of a GPT model of Megatron-Core, as NeMo 1 has them
--vocabulary-multiple int =1 N | pad the rows of the embedding and the output layer with zeros to a multiple of N
  (default: 1, no padding)
--tensor-parallel >=1 =1 to:num_ranks N | number of tensor-parallel ranks, each with its own file of weights
  (default: 1)
--compress {true,false} =true | true: one .qnemo file; false: a directory (default: true)
"""
"""The options that some targets use."""
_LINES = {line.split()[0]: line for line in OPTIONS.replace("\n  ", " ").strip().splitlines()}
_SETTINGS = {names[0]: settings for names, settings in options_in(OPTIONS)}


def attribute(flag: str) -> str:
    """Return the attribute of the parsed arguments, which is the keyword argument of the target's function."""
    name: str = _SETTINGS[flag].get("dest", flag.removeprefix("--").replace("-", "_"))
    return name


def unused_option(arguments: Namespace, target: Target) -> str | None:
    """Return an option on the command line that *target* does not use. Returns None when there is none."""
    for flag, settings in _SETTINGS.items():
        default = settings.get("default", False if "action" in settings else None)
        default = settings.get("type", str)(default) if isinstance(default, str) else default
        if flag not in target.options and getattr(arguments, attribute(flag), default) != default:
            return flag
    return None


def options_of(targets: Sequence[Target]) -> str:
    """Return the lines of the options that *targets* use, for several targets with their names."""
    lines = []
    for flag, line in _LINES.items():
        users = ", ".join(target.name for target in targets if flag in target.options)
        if users:
            lines.append(line if len(targets) == 1 else line.replace("| ", f"| {users}: ", 1))
    return "\n".join(lines)


class Target(NamedTuple):
    """A value of ``--to``.

    *summary* describes it in ``--help``, as does *output*, the default of ``--output``. An option that is not in
    *options* is an error when it is given. *supplied* returns more keyword arguments. *resumes* states whether the
    other program continues the run, with its optimizer state.
    """

    name: str
    summary: str
    output: str
    options: Strings
    supplied: Callable[[Namespace, Path], Values] | None = None
    resumes: bool = False

    def run(self, arguments: Namespace, source: Path) -> ValueDict:
        """Export the checkpoint in *source*, print the path, and return the document of ``--json``."""
        from automodel_ckpt.convert.targets.flow import export_to

        keywords = {attribute(flag): getattr(arguments, attribute(flag)) for flag in self.options}
        if self.supplied is not None:
            keywords |= self.supplied(arguments, source)
        source = keywords.pop("source", source)
        report = export_to(self.name, source, arguments.output, log=log, **keywords)
        log(report_line(f"wrote {counted(report.num_tensors, 'tensor')}", report, report.summary))
        if not arguments.json:
            print_path(report.output)
        document = {**asdict(report), **report.details, "output": str(report.output)}
        del document["details"], document["summary"]
        return document


def log(text: str) -> None:
    """Log a line on standard error, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {printable(text)}", file=sys.stderr, flush=True)


def report_line(text: str, report: Any, details: str = "") -> str:
    """Return the line about a finished export: *text*, size, time, and whether digests were compared."""
    digests = "digests checked" if report.checked else "source unchecked"
    line = f"{text}, {size_text(report.nbytes)}, {report.seconds:.1f} s ({digests})"
    return f"{line}: {details}" if details else line


# ---------------------------------------------------------------- what a target needs in addition to its options


def _scheme(arguments: Namespace, source: Path) -> Values:
    from automodel_ckpt.convert.targets.compressed_tensors import SCHEMES

    if arguments.scheme not in SCHEMES:
        raise RecipeError(
            "compressed-tensors needs a scheme of quantization",
            "ckpt export --scheme",
            arguments.scheme,
            f"one of {', '.join(SCHEMES)}",
        )
    from automodel_ckpt.models.inspect.signature import linear_weights

    return {"linear_weights": linear_weights}


def _exporter(arguments: Namespace, source: Path) -> Values:
    from automodel_ckpt.models.onnx_export import export_to_onnx, require_onnx

    require_onnx()
    return {"exporter": export_to_onnx}


def _trainer(arguments: Namespace, source: Path) -> Values:
    """The intervals are from the recipe in the checkpoint; the others are the Trainer's defaults."""
    from automodel_ckpt.checkpoint.files.layout import CONFIG
    from automodel_ckpt.cli.common.model_parameters import parameters_in
    from automodel_ckpt.cli.common.paths import whole_checkpoint
    from automodel_ckpt.config.changes import saved_recipe

    # As the other targets, it accepts the directory model/ of a checkpoint.
    source = whole_checkpoint(source)
    recipe = saved_recipe(source / CONFIG)
    found = {}
    for name, key in (
        ("train_batch_size", "local_batch_size"),
        ("save_steps", "ckpt_every_steps"),
        ("eval_steps", "val_every_steps"),
    ):
        text = recipe.get(f"step_scheduler.{key}", "")
        # ckpt_every_steps may also be `auto` or null.
        if text.isdecimal() and 0 < int(text) < 2**31:
            found[name] = int(text)
    return {"source": source, "parameters_in": parameters_in, "intervals": found}


TARGETS: tuple[Target, ...] = (
    Target(
        "hf",
        "Hugging Face files, the same as `ckpt consolidate`",
        "consolidated/ in the model's directory",
        ("--cast-dtype", "--nproc", "--num-threads", "--merge", "--base"),
    ),
    Target(
        "gguf",
        "one file for llama.cpp: Llama, Mistral, Qwen 2 and 3, SmolLM, Gemma 2 and 3",
        "NAME.gguf next to the checkpoint",
        ("--cast-dtype", "--type", "--num-threads", "--force"),
    ),
    Target(
        "torch",
        "one state dict for torch.load",
        "NAME.pt next to the checkpoint",
        ("--cast-dtype", "--force", "--prefix"),
    ),
    Target(
        "lightning",
        "a file that PyTorch Lightning's Trainer resumes from",
        "NAME.ckpt next to the checkpoint",
        ("--cast-dtype", "--force", "--prefix"),
        resumes=True,
    ),
    Target(
        "trainer",
        "a checkpoint that transformers' Trainer resumes from",
        "checkpoint-N next to the checkpoint",
        ("--callback",),
        _trainer,
        resumes=True,
    ),
    Target(
        "dcp",
        "a directory for torch.distributed.checkpoint",
        "NAME-dcp next to the checkpoint",
        ("--cast-dtype", "--prefix", "--names"),
    ),
    Target(
        "compressed-tensors",
        "Hugging Face files with quantized linear layers, for vLLM and transformers",
        "NAME-SCHEME next to the checkpoint",
        ("--scheme", "--cast-dtype"),
        _scheme,
    ),
    Target(
        "nemo",
        "a .nemo file for NeMo",
        "NAME.nemo next to the checkpoint",
        ("--cast-dtype", "--force", "--prefix", "--model-config", "--target", "--megatron-names"),
    ),
    Target(
        "megatron",
        "a distributed checkpoint (torch_dist) for Megatron-Core",
        "NAME-megatron next to the checkpoint",
        ("--cast-dtype", "--num-threads", "--vocabulary-multiple"),
    ),
    Target(
        "qnemo",
        "a checkpoint of TensorRT-LLM: Llama and Mistral, not quantized",
        "NAME.qnemo next to the checkpoint",
        ("--cast-dtype", "--force", "--tensor-parallel", "--compress"),
    ),
    Target(
        "onnx",
        "model.onnx for onnxruntime: language models, without a cache of keys and values; classifiers; embeddings",
        "NAME-onnx next to the checkpoint",
        ("--cast-dtype", "--num-threads"),
        _exporter,
    ),
)
"""All targets, in the order of ``--help``."""


# ---------------------------------------------------------------- --to hf: Hugging Face files


def export_hf(
    source: AnyPath,
    output: str | None,
    *,
    cast_dtype: str | None,
    num_procs: int,
    num_threads: int,
    print_output: bool = True,
) -> ConsolidationReport:
    """Export *source* to Hugging Face files and log to standard error.

    With *print_output*, prints the output directory on standard output.
    """
    from automodel_ckpt.checkpoint.export.consolidate import consolidate
    from automodel_ckpt.convert.open import open_source

    report = consolidate(
        source,
        output,
        cast_dtype=cast_dtype,
        num_threads=num_threads,
        num_procs=num_procs,
        log=log,
        opener=open_source,
    )
    _finish(report, print_output=print_output)
    return report


def run_hf(arguments: Namespace, source: Path) -> ValueDict:
    """Export as the command line asks, and return the document of ``--json``."""
    if arguments.merge:
        report = _merged(arguments, source)
        _finish(report, print_output=not arguments.json)
    elif arguments.base is not None:
        raise without_effect(
            arguments.command, "--base", arguments.base, "with --to hf without --merge"
        )
    else:
        report = export_hf(
            source,
            arguments.output,
            cast_dtype=arguments.cast_dtype,
            num_procs=arguments.nproc,
            num_threads=arguments.num_threads,
            print_output=not arguments.json,
        )
    casts = {f"{before}->{after}": count for (before, after), count in report.casts.items()}
    return {**asdict(report), "output": str(report.output), "casts": casts}


def _merged(arguments: Namespace, source: Path) -> ConsolidationReport:
    if arguments.nproc != 1:
        raise without_effect(arguments.command, "--nproc", arguments.nproc, "with --to hf --merge")
    from automodel_ckpt.base.store_url import cache_directory
    from automodel_ckpt.convert.merging.merge import merge
    from automodel_ckpt.models.inspect.repository import base_directory
    from automodel_ckpt.models.inspect.signature import read_signature

    return merge(
        source,
        arguments.output,
        base=arguments.base,
        directory_of=base_directory,
        naming_of=read_signature,
        cast_dtype=arguments.cast_dtype,
        cache=cache_directory(),
        log=log,
    )


def _finish(report: ConsolidationReport, *, print_output: bool) -> None:
    from automodel_ckpt.checkpoint.export.next_steps import hf_lines

    tensors, files = counted(report.num_tensors, "tensor"), counted(report.num_files, "file")
    log(report_line(f"wrote {tensors} in {files}", report))
    if print_output:
        print_path(report.output)
        for line in hf_lines(Path(report.output)):
            log(line)
