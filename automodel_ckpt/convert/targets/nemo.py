"""A checkpoint's model as a ``.nemo`` file: config, artifacts and one file of torch.save in a tar archive, streamed.

NeMo restores it with ``restore_from`` of a class with these names in its state dict. The config has no key ``target``
unless one is given: NeMo 3 rejects classes outside its packages. The Hugging Face config and the tokenizer's
files are artifacts: the config refers to them by ``nemo:`` and their names in the archive (source: NeMo 3.0,
nemo.core.connectors.save_restore_connector). With Megatron's names, the file has the structure of NeMo 1's GPT models:
their state dict has the prefix ``model.``. Imports no torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import yaml

from automodel_ckpt.checkpoint.files.safe_open import parse_json, read_safely, without_links
from automodel_ckpt.checkpoint.files.type_aliases import FileDict, Files, ValueDict, Values
from automodel_ckpt.checkpoint.pickles.torch_archive_writing import write_torch_archive
from automodel_ckpt.checkpoint.sources.source import Source
from automodel_ckpt.convert.formats.nemo.nemo import (
    ARTIFACT_PREFIX,
    CONFIG,
    MAX_CONFIG_BYTES,
    WEIGHTS,
)
from automodel_ckpt.convert.formats.nemo.plain_yaml import parse_yaml
from automodel_ckpt.convert.formats.nemo.tar_files import TarWriter
from automodel_ckpt.convert.names.conversion import conversion_in, required_conversion
from automodel_ckpt.convert.names.dimensions import Dimensions
from automodel_ckpt.convert.targets.flow import Export, ExportReport
from automodel_ckpt.convert.targets.torch_file import state_dict_of
from automodel_ckpt.errors import RecipeError

# NeMo's GPT model has Megatron's as the attribute `model`.
_GPT_PREFIX = "model."


def write(
    export: Export,
    *,
    prefix: str | None = None,
    model_config: Path | None = None,
    model_class: str | None = None,
    megatron_names: bool = False,
) -> ExportReport:
    """Write the model as a ``.nemo`` file.

    *prefix* is added to the names of all tensors, for a NeMo class that has the model as an attribute. The file
    *model_config* is YAML with the config of that class; the references to artifacts are added to it. *model_class*
    becomes its key ``target``.
    """
    config = _given_config(model_config)
    if model_class is not None:
        config["target"] = model_class
    opened = export.source
    export.file(".nemo")
    export.check()
    files = export.config_and_tokenizer(export.cast_code)
    if megatron_names:
        opened = _with_megatron_names(export, config, files)
        prefix = prefix or _GPT_PREFIX
    artifacts = _add_artifacts(config, files)
    state_dict = state_dict_of(export, opened, prefix or "")
    content = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode()
    with export.published("the .nemo file") as file:
        writer = TarWriter(file)
        writer.add_bytes(CONFIG, content)
        for name, data in artifacts.items():
            writer.add_bytes(name, data)
        writer.add_streamed(WEIGHTS, lambda file: write_torch_archive(file, state_dict))
        writer.finish()
    return export.report(len(state_dict))


def _given_config(path: Path | None) -> ValueDict:
    """Return the content of the user's YAML file; an empty mapping without one. Raises :class:`RecipeError`."""
    if path is None:
        return {}
    try:
        real = without_links(path)
        text = read_safely(real.parent, real.name, limit=MAX_CONFIG_BYTES).decode()
        # Checked first: it rejects references and deep nesting. Then read again, with numbers as numbers.
        parse_yaml(text)
        value = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _wrong_config(path, str(error)[:300]) from error
    if not isinstance(value, dict):
        raise _wrong_config(path, f"a {type(value).__name__}, not a mapping")
    return value


def _wrong_config(path: Path, value: str) -> RecipeError:
    return RecipeError(
        "the config of the NeMo model cannot be used",
        f"ckpt export --model-config {path}",
        value,
        "use a YAML mapping, such as the model_config.yaml of another .nemo file",
    )


def _with_megatron_names(export: Export, config: ValueDict, files: Files) -> Source:
    """Return the source with Megatron's tensors, and add the keys of NeMo's GPT config to *config*.

    Keys that the user's config has are not changed. Raises :class:`CheckpointUnusable` for a model without a converter,
    and for a damaged file: the converted tensors have no digests.
    """
    source, where = export.source, export.where
    side = export.required_config("a model with Megatron's names")
    conversion = required_conversion(conversion_in(side), side)
    hugging_face = parse_json(files["config.json"])
    export.check_language_model(hugging_face, "NeMo's GPT")
    export.check(reads_parts=True)
    dimensions = conversion.dimensions
    converted = conversion.converter.from_hugging_face(source.tensors, dimensions, where)
    is_tied = "output_layer.weight" not in converted.tensors
    for key, value in gpt_config(hugging_face, dimensions, is_tied).items():
        config.setdefault(key, value)
    # Without the manifest, which describes the tensors under their former names.
    return replace(source, tensors=converted.tensors, tied={}, manifest=None)


def gpt_config(hugging_face: Values, dimensions: Dimensions, is_tied: bool) -> ValueDict:
    """Return the keys of NeMo 1's GPT config that describe the model of a Hugging Face config.

    Source of the keys: NeMo 1's examples/nlp/language_modeling/conf/megatron_llama_config.yaml.
    """
    model_type = str(hugging_face.get("model_type"))
    length = hugging_face.get("max_position_embeddings")
    parameters = hugging_face.get("rope_parameters") or {}
    config = {
        "mcore_gpt": True,
        "num_layers": dimensions.num_layers,
        "hidden_size": hugging_face.get("hidden_size"),
        "ffn_hidden_size": hugging_face.get("intermediate_size"),
        "num_attention_heads": dimensions.num_heads,
        "num_query_groups": dimensions.num_query_groups,
        "kv_channels": dimensions.head_size,
        "vocab_size": dimensions.vocab_size,
        "encoder_seq_length": length,
        "max_position_embeddings": length,
        "normalization": "rmsnorm",
        "layernorm_epsilon": hugging_face.get("rms_norm_eps"),
        "activation": "fast-swiglu",
        "bias": False,
        "qkv_bias": model_type == "qwen2",
        "qk_layernorm": model_type.startswith("qwen3"),
        "position_embedding_type": "rope",
        "rotary_base": parameters.get("rope_theta") or hugging_face.get("rope_theta"),
        "share_embeddings_and_output_weights": is_tied,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
    }
    if dimensions.num_experts:
        config["num_moe_experts"] = dimensions.num_experts
        config["moe_router_topk"] = hugging_face.get("num_experts_per_tok")
    return config


def _add_artifacts(config: ValueDict, files: Files) -> FileDict:
    """Add references to *files* to *config*; return the artifacts by their names in the archive.

    The Hugging Face config becomes ``hf_config``, and the files of the tokenizer become keys of ``tokenizer``, in which
    dots are replaced: OmegaConf separates keys by dots. Keys that the user's config has are not changed.
    """
    artifacts = {}
    tokenizer = config.setdefault("tokenizer", {})
    for name, content in files.items():
        # NeMo puts 32 hexadecimal digits before the names, so that artifacts of several models can coexist.
        digest = hashlib.sha256(content).hexdigest()[:32]
        artifact = f"{digest}_{name}"
        if name == "config.json":
            section, key = config, "hf_config"
        elif isinstance(tokenizer, dict):
            section, key = tokenizer, name.replace(".", "_")
        else:
            continue
        if key in section:
            continue
        section[key] = ARTIFACT_PREFIX + artifact
        artifacts[artifact] = content
    if not tokenizer:
        del config["tokenizer"]
    return artifacts
