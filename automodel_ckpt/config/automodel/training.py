"""Optimization in NeMo AutoModel's recipes: optimizer, schedule, steps, clipping, loss and compilation."""

from __future__ import annotations

from dataclasses import replace

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Section,
    is_of_automodel,
    is_true,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

TE_ADAM = (
    "transformer_engine.pytorch.optimizers.FusedAdam",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
)
FLASH_ADAMW = "flashoptim.FlashAdamW"
_FUSED = "fused AdamW of torch is used, whose state has the data type of the weights"
_ADAMW = {"torch.optim.AdamW": "", **dict.fromkeys((*TE_ADAM, FLASH_ADAMW), _FUSED)}
"""Optimizers that are AdamW, and what is used instead of them."""
_UNUSED = """
- foreach fused capturable adam_w_mode bias_correction master_weights master_weight_bits master_weight_dtype
- exp_avg_dtype exp_avg_sq_dtype store_param_remainders compress_state_dict
"""
_OPTIMIZER = f"""
lr = 0.001
betas
eps
epsilon -> eps
weight_decay
{_UNUSED}
"""


def optimizer(section: Section) -> None:
    """Translate the optimizer. AutoModel applies weight decay to all parameters, also to norms and biases."""
    node = section.peek("_target_")
    target = section.text("_target_") or "torch.optim.AdamW"
    decay = section.peek("weight_decay")
    if node is not None and target == "dion.Muon":
        _muon(section, node)
        return
    _master_weights(section, target)
    adam_w = "adam_w_mode"
    is_penalty = target == "torch.optim.Adam"
    if target in TE_ADAM:
        is_penalty = section.peek(adam_w) is not None and not section.is_on(adam_w)
        section.apply("! bias_correction in false: Adam without bias correction | remove the key")
    if is_penalty and value_of(decay):
        _adam(section, node)
        return
    if target not in (*_ADAMW, "torch.optim.Adam"):
        return
    if node is not None and _ADAMW.get(target):
        section.take("_target_")
        section.degraded("_target_", node, _ADAMW[target])
    section.take("_target_")
    if target in ("torch.optim.Adam", *TE_ADAM) and decay is None:
        section.put_default("weight_decay", "0.0")
    section.apply(_OPTIMIZER)
    found = section.ours("optimizer.weight_decay")
    if found is None or value_of(found):
        section.put_default("no_decay", "none")


def _master_weights(section: Section, target: str) -> None:
    """Keep the weights in float32 if the optimizer *target* keeps such a copy of them, as torch's optimizers do not.

    The forward pass computes in bfloat16 in both programs. Adapters are in float32 here anyway.
    """
    name = "master_weights"
    is_kept = target in TE_ADAM and section.is_on(name)
    if target == FLASH_ADAMW:
        # 8 or 16 further bits of a bfloat16 weight; 24 bits in all are its default.
        name = "master_weight_bits"
        is_kept = section.get(name) is None or section.peek(name) is not None
    dtype = section.ours("model.dtype")
    is_stated = section.theirs("model.dtype") or section.theirs("peft") or section.ours("peft")
    if not is_kept or is_stated or dtype is None or dtype.is_flag or dtype.value == "float32":
        return
    node = section.take(name)
    if node is None:
        name, node = "_target_", section.peek("_target_")
    assert node is not None
    # Null is float32 for what is trained. With float32, frozen weights would not keep the 16 bits of their files.
    section.put_root("model.dtype", Node("null", node.origin))
    computed = section.ours("distributed.mixed_precision")
    if computed is not None and computed.value == "none" and computed.origin == AUTOMODEL_DEFAULT:
        # With DDP, AutoModel computes in the data type of its weights, which are not the optimizer's copy.
        section.work.section("").put_default("distributed.mixed_precision", "bfloat16")
    text = "trained weights are kept in float32 (model.dtype: null), and cast for each forward pass"
    section.note(name, node, text)


def _muon(section: Section, node: Node) -> None:
    """Translate dion's Muon: torch's for the hidden matrices, AdamW for the other parameters."""
    rate = section.take("lr") or Node("0.01", AUTOMODEL_DEFAULT)
    other = value_of(section.peek("scalar_lr") or rate)
    options = {
        "params": Node([Node("hidden_matrices", node.origin)], node.origin),
        "_target_": Node("torch.optim.Muon", node.origin),
        "lr": rate,
        "momentum": section.take("mu"),
        "nesterov": section.take("nesterov"),
        "weight_decay": section.peek("weight_decay"),
        # Otherwise the group would inherit it.
        "eps": section.peek("scalar_eps") and Node("1e-7", AUTOMODEL_DEFAULT),
    }
    group = {name: option for name, option in options.items() if option is not None}
    section.put("lr", rate)
    section.rename("scalar_lr", "lr")
    for name in ("embed_lr", "lm_head_lr"):
        option = section.peek(name)
        if option is not None and value_of(option) != other:
            section.take(name)
            section.degraded(name, option, "all parameters outside of matrices have one rate")
        section.drop(name)
    section.put("groups", Node([Node(group, node.origin)], node.origin))
    section.apply("""
        weight_decay
        - _target_ flatten use_triton scalar_opt
        scalar_betas -> betas
        scalar_eps -> eps
        ~ adjust_lr in spectral_norm: torch.optim.Muon scales updates by sqrt(max(1, rows / columns))
        - betas epsilon eps
    """)


def _adam(section: Section, node: Node | None) -> None:
    """Translate Adam with weight decay, which is an L2 penalty and not the decay of AdamW."""
    assert node is not None
    section.take("_target_")
    section.put("_target_", replace(node, value="torch.optim.Adam"))
    is_torch = node.value not in TE_ADAM
    if not is_torch:
        section.degraded("_target_", node, "Adam of torch is used")
    section.apply(
        "lr\nbetas\neps\nweight_decay\nforeach\nfused\namsgrad" if is_torch else _OPTIMIZER
    )
    section.put_default("no_decay", "none")


def schedule(section: Section) -> None:
    """Translate the schedule of the learning rate. Without the section it is constant in both programs."""
    if section.node is None:
        return
    style = section.take("lr_decay_style")
    if style is None and section.peek("name") is not None:
        return
    style = style or Node("cosine", AUTOMODEL_DEFAULT)
    warmup = section.peek("lr_warmup_steps")
    if style.value not in ("cosine", "linear", "constant"):
        section.reject(
            "lr_decay_style",
            style,
            "this schedule is not supported",
            "set lr_scheduler.name (ckpt-train --help) instead of lr_decay_style",
        )
        section.take("min_lr")
    elif style.value == "constant":
        is_plain = warmup is not None and not value_of(warmup)
        name = "constant" if is_plain else "constant_with_warmup"
        section.put("name", replace(style, value=name))
        section.drop("min_lr", "lr_decay_steps")
    else:
        _decay(section, style)
    if warmup is not None:
        section.rename("lr_warmup_steps", "warmup_steps")
    elif section.theirs("lr_scheduler.warmup_ratio") is None:
        section.put_default("warmup_steps", "auto")
    if warmup is None or value_of(warmup):
        section.put_default("warmup_from", "0.1")
    section.apply("""
        lr_decay_steps -> decay_steps
        - lr_warmup_steps use_checkpoint_opt_param_scheduler override_opt_param_scheduler
        ~ init_lr: the warmup begins at a tenth of optimizer.lr, or there is none
        ~ max_lr: the peak is optimizer.lr
        ! start_wd: a schedule of the weight decay | set optimizer.weight_decay
        ! end_wd: a schedule of the weight decay | set optimizer.weight_decay
        - wd_incr_steps wd_incr_style
    """)


def _decay(section: Section, style: Node) -> None:
    """Write a decay to AutoModel's lowest learning rate: a hundredth of the peak if none is given."""
    lowest = section.take("min_lr")
    if lowest is None:
        peak = value_of(section.ours("optimizer.lr"))
        number = peak / 100 if isinstance(peak, int | float) else 0.0
        lowest = Node(repr(number), AUTOMODEL_DEFAULT)
    name, key = "cosine_with_min_lr", "kwargs.min_lr"
    if style.value != "cosine":
        name, key = "polynomial", "kwargs.lr_end"
        section.put("kwargs.power", Node("1.0", style.origin))
    section.put("name", replace(style, value=name))
    section.put(key, lowest)


def steps(section: Section) -> None:
    """Translate batch sizes and intervals. With pipeline stages, the size of their micro-batches is used."""
    size = section.peek("local_batch_size")
    if section.ours("step_scheduler.local_batch_size") and not (size and size.is_flag):
        section.drop("local_batch_size")
    is_repeated = _is_repeated(section)
    if is_repeated:
        _drop_epochs(section)
    section.apply(f"""
        local_batch_size
        global_batch_size = 32
        max_steps
        {"" if is_repeated else "num_epochs = 10"}
        ckpt_every_steps = 100
        - gc_every_steps loss_average_window_steps start_step start_epoch
        ~ validate_on_checkpoint in false: each checkpoint is validated if there is validation data
    """)
    # Without either, AutoModel trains for 10 epochs, also if both keys are null in the file.
    if not any(section.ours(f"step_scheduler.{name}") for name in ("num_epochs", "max_steps")):
        section.put_default("num_epochs", "10")
    every_epoch = section.take("save_checkpoint_every_epoch")
    if is_repeated:
        # All steps are one epoch there. It ends with the run.
        section.put_default("ckpt_every_epochs", "null")
        if every_epoch is not None:
            section.no_effect("save_checkpoint_every_epoch", every_epoch)
    elif every_epoch is not None:
        # Null steps mean the steps of an epoch.
        has_steps = section.ours("step_scheduler.ckpt_every_steps") is not None
        value = "1" if is_true(every_epoch) or not has_steps else "null"
        node = Node(value, every_epoch.origin)
        section.put("ckpt_every_epochs", node)
    # Without validation data, ours would be an error.
    sets = ("validation_dataset", "validation_datasets")
    found = [find(name) for find in (section.ours, section.theirs) for name in sets]
    if any(node is not None and not node.is_null for node in found):
        section.rename("val_every_steps")
    else:
        section.drop("val_every_steps")


def _is_repeated(section: Section) -> bool:
    """Whether AutoModel repeats the training data until ``max_steps``, whatever the number of epochs is.

    Its streams and the samples of nanoGPT's files never end (``nanogpt_dataset.py``), and Megatron's samples are as
    many as the steps need (``megatron_dataset.py``).
    """
    target = section.ours("dataset._target_")
    are_tokens = target is not None and ".token_files." in str(target.value)
    is_stream = is_true(section.ours("dataset.streaming"))
    return (are_tokens or is_stream) and section.peek("max_steps") is not None


def _drop_epochs(section: Section) -> None:
    """Leave the number of epochs out of a recipe with repeated data, unless a flag of the command states it."""
    node = section.peek("num_epochs")
    if node is not None and node.is_flag:
        section.rename("num_epochs")
        return
    section.take("num_epochs")
    section.put_default("num_epochs", "null")
    if node is not None:
        text = "max_steps ends the run; the data are repeated until then, as in AutoModel"
        section.note("num_epochs", node, text)


_LOSSES = (
    "masked_ce.MaskedCrossEntropy",
    "linear_ce.FusedLinearCrossEntropy",
    "te_parallel_ce.TEParallelCrossEntropy",
    "chunked_ce.ChunkedCrossEntropy",
    "loss.Gemma4TensorParallelFusedLinearCrossEntropy",
)
"""The ends of the names of AutoModel's implementations of the cross-entropy of labeled tokens."""


def loss(section: Section) -> None:
    """Translate the loss. Ours is the cross-entropy, computed in chunks of the labeled tokens."""
    node, name = section.peek("_target_"), section.text("_target_")
    if node is None or not is_of_automodel(name):
        return
    if name.endswith(_LOSSES):
        section.drop(*section.names())
    else:
        section.reject(
            "_target_",
            node,
            "this loss is not supported",
            "remove loss_fn to train with cross-entropy",
        )
    section.work.section("").take("loss_fn")


def compilation(section: Section) -> None:
    """Translate torch.compile. The keys of a disabled section would be an error here."""
    if section.node is not None and not section.is_on("enabled"):
        section.drop("enabled", "mode", "backend", "fullgraph", "dynamic")
    else:
        section.apply("enabled\nmode @not_default\nbackend\nfullgraph\ndynamic")
