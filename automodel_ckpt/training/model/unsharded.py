"""The model of a recipe before anything changes it: by ``_target_``, from pretrained files, or with fresh weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from automodel_ckpt.config.callables.plugins import build
from automodel_ckpt.config.keys.model import ModelConfig
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.tree.rules import Target
from automodel_ckpt.errors import RecipeError
from automodel_ckpt.models.build import restore_attention_caps
from automodel_ckpt.models.inspect.error_texts import naming_files
from automodel_ckpt.models.inspect.vocabulary import wanted_size
from automodel_ckpt.models.loss.mtp_families import MtpPlan, plan_mtp
from automodel_ckpt.models.model_checks import check_complete
from automodel_ckpt.parallel.mesh import RankLayout
from automodel_ckpt.training.model.deferred_model import DeferredModel, build_deferred
from automodel_ckpt.training.model.model_config import text_tokenizer
from automodel_ckpt.training.model.request import ModelRequest


def build_unsharded(request: ModelRequest) -> DeferredModel:
    """Build the model that the section ``model`` describes, without values where possible. A collective.

    Raises :class:`RecipeError` for what the model does not support, and :class:`CheckpointUnusable` for damaged files
    of the base.
    """
    config, layout = request.config, request.layout
    section = config.model
    if isinstance(section, Target):
        made = build(section)
        check_complete(made)
        if "attn_implementation" not in section.kwargs:
            restore_attention_caps(made)
        return DeferredModel(made)
    assert request.model_config is not None
    base = _base(request, section)
    if base is not None:
        # A dry run reads no weights.
        level = "size" if request.is_dry_run else config.checkpoint.verify
        from automodel_ckpt.training.parts.init_from import verify_base

        verify_base(base, level, layout, layout.gloo_group, section.revision)
    files = f"config.json and generation_config.json of {base}" if base else "model.from_config"
    with naming_files("transformers cannot build this model", files):
        return build_deferred(
            section,
            request.model_config,
            base=base,
            auto_class=request.auto_class,
            seed=config.seed,
            group=layout.gloo_group,
            vocab_size=wanted_size(section.vocab_size, text_tokenizer(request.preprocessor)),
            **_for_adapters(config, layout),
            mtp=_mtp_plan(request, section, base),
            # A model that is not trained needs the head of its files.
            allow_new_head=request.has_task_head and request.is_trained,
        )


def _for_adapters(config: RecipeConfig, layout: RankLayout) -> dict[str, Any]:
    """What the section ``peft`` asks of the base: that it is read as a whole, or quantized."""
    if config.peft is None:
        return {}
    from automodel_ckpt.models.layers.adapter import why_whole
    from automodel_ckpt.training.model.adapters import lora_of, quantization

    return {
        "needs_values": why_whole(lora_of(config.peft)),
        "loading": quantization(config, layout),
    }


def _base(request: ModelRequest, section: ModelConfig) -> str | None:
    """The directory or Hub name of the pretrained weights. None for fresh weights.

    ``peft.base_dir`` is created first if it does not exist, except in a dry run.
    """
    peft = request.config.peft
    if peft is None or peft.base_dir is None:
        return section.from_pretrained
    assert request.model_config is not None
    if request.is_dry_run and not Path(peft.base_dir).expanduser().exists():
        # A dry run writes nothing: the base would have the shapes of model.from_config.
        return None
    from automodel_ckpt.training.model.adapters import fresh_base

    fresh_base(
        request.config,
        request.model_config,
        auto_class=request.auto_class,
        preprocessor=request.preprocessor,
        layout=request.layout,
    )
    return peft.base_dir


def _mtp_plan(request: ModelRequest, section: ModelConfig, base: str | None) -> MtpPlan | None:
    """What the section ``model.mtp`` asks for; None without it. A model that is not trained gets no such layers."""
    if section.mtp is None or not request.is_trained:
        return None
    if request.has_task_head:
        raise RecipeError(
            "a model with a classification head predicts no tokens",
            where="model.mtp",
            value="a section",
            hint="remove model.mtp",
        )
    if request.packs_images and request.config.packed_sequence is not None:
        raise RecipeError(
            "multi-token prediction does not support packed samples with images",
            where="model.mtp",
            value="packed_sequence",
            hint="remove packed_sequence, or model.mtp",
        )
    assert request.model_config is not None
    return plan_mtp(
        request.model_config,
        num_depths=section.mtp.num_depths,
        repeat_layer=section.mtp.repeat_layer,
        factor=section.mtp.loss_scaling_factor,
        is_new=base is None or section.mtp.weights == "new",
    )
