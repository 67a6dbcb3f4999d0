"""The families of models with layers for multi-token prediction that can be trained: names in files, and settings.

Sources: vLLM's ``deepseek_mtp``, ``glm4_moe_mtp``, ``glm4_moe_lite_mtp``, ``qwen3_next_mtp``, ``qwen3_5_mtp`` and
``nemotron_h_mtp``; NeMo AutoModel's adapters of state dicts for Qwen3.5 and Nemotron-H, revision 36044ad3d; the config
classes of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from automodel_ckpt.checkpoint.files.type_aliases import Strings, Values
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.inspect.interface import CORRECT_FILE

WHERE = "model.mtp"
REMOVE_MTP = "remove model.mtp"
MOST_DEPTHS = 64
"""A config.json with a greater number is damaged: published models have 1 to 3 depths."""


@dataclass(frozen=True)
class DepthNames:
    """The names of the parts of one depth in files, without ``.weight``.

    *layers* are the prefixes of its decoder layers. *embedding* and *output* are copies of the model's embedding and
    output layer, which some files have for each depth; None: the files have none.
    """

    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layers: Strings
    embedding: str | None = None
    output: str | None = None


@dataclass(frozen=True)
class Family:
    """The types of models that name and build their layers in one way.

    *count* is the setting of the text model's config that has the number of depths in the files, and *default* its
    value where the config lacks it. *settings* are the settings of the config that the layers of a depth are built
    from, where they differ from the model's. *names* returns the names of depth *number*, from 0. *most* is the number
    of depths for which the files have separate layers; None: any number.
    """

    names: Callable[[int, Any], DepthNames]
    settings: Values
    count: str = "num_nextn_predict_layers"
    default: int = 0
    most: int | None = None


def _names_after_the_layers(number: int, config: Any) -> DepthNames:
    """Names of DeepSeek-V3: a depth is a further layer, numbered after the model's layers."""
    layer = f"model.layers.{config.num_hidden_layers + number}"
    return DepthNames(
        embedding_norm=f"{layer}.enorm",
        hidden_norm=f"{layer}.hnorm",
        projection=f"{layer}.eh_proj",
        norm=f"{layer}.shared_head.norm",
        layers=(layer,),
        embedding=f"{layer}.embed_tokens",
        output=f"{layer}.shared_head.head",
    )


def _names_of_qwen(number: int, config: Any) -> DepthNames:
    """Names of Qwen3-Next and Qwen3.5: one projection and one norm next to the layers."""
    return DepthNames(
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        projection="mtp.fc",
        norm="mtp.norm",
        layers=(f"mtp.layers.{number}",),
    )


def _names_of_nemotron(number: int, config: Any) -> DepthNames:
    """Names of Nemotron-H: the first layer of a depth has the projection, and the last one the norm."""
    size = len(config.mtp_layers_block_type)
    layers = [f"mtp.layers.{number * size + index}" for index in range(size)]
    return DepthNames(
        embedding_norm=f"{layers[0]}.enorm",
        hidden_norm=f"{layers[0]}.hnorm",
        projection=f"{layers[0]}.eh_proj",
        norm=f"{layers[-1]}.final_layernorm",
        layers=tuple(layers),
    )


_FULL_ATTENTION = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
_DEEPSEEK = Family(_names_after_the_layers, {"num_hidden_layers": 1, "first_k_dense_replace": 0})
# Its config.json has no number of depths, and its files have one.
_QWEN3_NEXT = Family(_names_of_qwen, _FULL_ATTENTION, default=1, most=1)
_QWEN3_5 = Family(_names_of_qwen, _FULL_ATTENTION, count="mtp_num_hidden_layers", most=1)

FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": Family(
        _names_after_the_layers, {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}
    ),
    # The config's mtp_layers_block_type lists its layers.
    "nemotron_h": Family(_names_of_nemotron, {}),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
}
"""The supported families, by ``model_type`` of the text model's config. A new one is an entry here."""


@dataclass(frozen=True)
class MtpPlan:
    """The layers of a run: how many tokens they predict, and what becomes of their loss.

    *num_depths* is the number of further tokens. The files have separate layers for *num_stored* of them: one, where
    one depth is repeated. The loss is multiplied by *factor*. *is_new*: the layers begin with random values.
    """

    family: Family
    num_depths: int
    num_stored: int
    factor: float
    is_new: bool


def plan_mtp(
    config: PreTrainedConfig,
    *,
    num_depths: int | None,
    repeat_layer: bool,
    factor: float,
    is_new: bool,
) -> MtpPlan:
    """Return the plan for a model of *config*; *num_depths* None: as many as its files have.

    The config is changed to state the number of depths that an export has. Raises :class:`RecipeError` for types of
    models that are not in :data:`FAMILIES`, and for numbers of depths that its files cannot have.
    """
    text: Any = config.get_text_config()
    family = FAMILIES.get(text.model_type)
    if family is None:
        raise RecipeError(
            "multi-token prediction is not supported for this type of model",
            where=WHERE,
            value=f"{text.model_type}; supported are {', '.join(sorted(FAMILIES))}",
            hint=REMOVE_MTP,
        )
    in_files = _num_in_files(family, text)
    wanted = num_depths or in_files
    num_stored = 1 if repeat_layer else wanted
    most = family.most or MOST_DEPTHS
    # A config may lack the number, or state 0, although the files have layers: then they are looked for.
    fits_base = is_new or num_stored == max(in_files, 1)
    if not 0 < wanted <= MOST_DEPTHS or num_stored > most or not fits_base:
        raise RecipeError(
            "the model has no layers for multi-token prediction of this many tokens",
            where=f"{WHERE}.num_depths",
            value=f"{wanted}; {family.count} of the base is {in_files}, and files have at most {most}",
            hint=f"set it to {max(in_files, 1)}; or repeat_layer: true, for one layer of all depths, or weights: "
            "new, for layers with random values",
        )
    if num_stored != in_files:
        setattr(text, family.count, num_stored)
    return MtpPlan(family, wanted, num_stored, factor, is_new)


def patterns_in_files(config: PreTrainedConfig) -> list[str]:
    """Globs that match the names of the layers in the files of a model of *config*; empty for other families."""
    text: Any = config.get_text_config()
    family = FAMILIES.get(text.model_type)
    if family is None:
        return []
    patterns: list[str] = []
    num_depths = min(max(1, _num_in_files(family, text)), MOST_DEPTHS)
    for number in range(num_depths):
        names = family.names(number, text)
        for prefix in (names.embedding_norm, names.hidden_norm, names.projection, names.norm):
            patterns.append(f"{prefix}.*")
        for layer in names.layers:
            patterns.append(f"{layer}.*")
    return patterns


def _num_in_files(family: Family, text: Any) -> int:
    """The number of depths with separate layers that the config of the text model states.

    Raises :class:`RecipeError` if it is not a number from 0.
    """
    number = getattr(text, family.count, None)
    if number is None:
        return family.default
    if not isinstance(number, int) or number < 0:
        raise RecipeError(
            "the model's config has no valid number of layers for multi-token prediction",
            where=f"config.json, {family.count}",
            value=number,
            hint=CORRECT_FILE,
        )
    return number
