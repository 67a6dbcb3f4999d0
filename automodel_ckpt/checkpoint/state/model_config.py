"""Check that a model computes the function of the saved one, where tensor shapes cannot show it.

A different number of attention heads, rope theta or activation leaves every shape unchanged: the weights load, but
compute a different function. The checkpoint's config.json is therefore compared with the model's config. Imports
no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_ckpt.checkpoint.export.files import without_older_keys
from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.safe_open import parse_json, read_safely
from automodel_ckpt.checkpoint.files.type_aliases import Files, ValueDict, Values
from automodel_ckpt.errors import unusable

CONFIG = "config.json"
_MAX_BYTES = 16 << 20
_MAX_DEPTH = 20
_SHOWN_LETTERS = 100
_MOST_LINES = 20

# Keys about the model's origin, its name, how it is stored, and how text is generated with it.
_COSMETIC = frozenset(
    {
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "architectures",
        "auto_map",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "id2label",
        "label2id",
        "chunk_size_feed_forward",
        "torchscript",
        "tokenizer_class",
        "task_specific_params",
        "pretraining_tp",
        "quantization_config",
        "gradient_checkpointing",
        "bos_token_id",
        "eos_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
    }
)
# Keys that change how a model is trained, and not what its weights compute.
_OF_TRAINING = frozenset(
    {
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_coef",
        "router_z_loss_coef",
        "router_jitter_noise",
        "input_jitter_noise",
        "init_std",
        "pad_token_id",
        "max_position_embeddings",
    }
)
_OF_TRAINING_PARTS = ("dropout", "pdrop", "layerdrop", "drop_path", "drop_rate", "initializer_")


@dataclass(frozen=True, slots=True)
class ConfigChanges:
    """The differences between two model configs, one line each: of the function, and of training only."""

    function: tuple[str, ...] = ()
    training: tuple[str, ...] = ()


def saved_config(checkpoint: Path, directory: str) -> ValueDict | None:
    """The config.json of the module in *directory* of *checkpoint*; None where it has none.

    Raises :class:`CheckpointUnusable` for a file that is no JSON object.
    """
    for name in (f"{directory}/{layout.HF_METADATA}/{CONFIG}", f"{directory}/{CONFIG}"):
        try:
            config = parse_json(read_safely(checkpoint, name, limit=_MAX_BYTES))
            if not isinstance(config, dict):
                raise ValueError("not a mapping")
            return config
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise unusable(
                "the model's config in the checkpoint cannot be read",
                checkpoint / name,
                str(error)[:_SHOWN_LETTERS],
            ) from error
    return None


def config_changes(
    saved: Values, here: Values, *, there: str = "in the checkpoint"
) -> ConfigChanges:
    """Compare two model configs, as config.json has them. *there* says where the *saved* one is.

    Versions of transformers write different keys. Where the versions differ, only keys that both have are compared.
    """
    # Checkpoints of earlier revisions lack the older keys.
    before = dict(_leaves(without_older_keys(saved)))
    now = dict(_leaves(without_older_keys(here)))
    keys = before.keys() & now.keys()
    if saved.get("transformers_version") == here.get("transformers_version"):
        keys = before.keys() | now.keys()
    function = []
    training = []
    for key in sorted(keys):
        is_equal = key in before and key in now and before[key] == now[key]
        if is_equal or _is_cosmetic(key):
            continue
        line = f"{key}: {_text(before, key)} {there}, {_text(now, key)} here"
        if _is_of_training(key, now):
            training.append(line)
        else:
            function.append(line)
    return ConfigChanges(tuple(function), tuple(training))


def model_changes(checkpoint: Path, configs: Files) -> ConfigChanges:
    """Compare the config.json (its content) of each module, by attribute name, with the one saved in *checkpoint*.

    A module that was saved without a config is not compared. Raises :class:`CheckpointUnusable` for a damaged file.
    """
    found = ConfigChanges()
    for name, content in configs.items():
        saved = saved_config(checkpoint, layout.state_directory(name))
        if saved is not None:
            changes = config_changes(saved, json.loads(content))
            found = ConfigChanges(
                found.function + changes.function, found.training + changes.training
            )
    return found


def require_same_function(checkpoint: Path, changes: ConfigChanges) -> None:
    """Raise :class:`CheckpointUnusable` where the weights in *checkpoint* would compute a different function."""
    if changes.function:
        raise unusable(
            "the model differs from the one that was saved: the weights fit, but compute a different function",
            checkpoint,
            "\n    " + "\n    ".join(changes.function[:_MOST_LINES]),
            "restore the saved values (see the checkpoint's config.yaml), or accept "
            "the change with --checkpoint.allow_changed_model true",
        )


def _leaves(config: Values, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of each value that is not a mapping; a list is one value."""
    for name, value in config.items():
        # The file is not trusted: beyond the limit a mapping is compared as one value.
        if isinstance(value, Mapping) and value and depth < _MAX_DEPTH and name not in _COSMETIC:
            yield from _leaves(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _is_cosmetic(key: str) -> bool:
    name = key.rpartition(".")[2]
    return name in _COSMETIC or name.startswith("_")


def _is_of_training(key: str, now: Values) -> bool:
    name = key.rpartition(".")[2]
    if name == "max_position_embeddings":
        # Some kinds of rope scale with it. Learned position embeddings then have another shape, which loading detects.
        kinds = [value for other, value in now.items() if other.endswith("rope_type")]
        return all(kind == "default" for kind in kinds)
    return name in _OF_TRAINING or any(part in name for part in _OF_TRAINING_PARTS)


def _text(values: Values, key: str) -> str:
    return json.dumps(values[key])[:_SHOWN_LETTERS] if key in values else "not set"
