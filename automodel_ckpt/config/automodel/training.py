"""Optimization in NeMo AutoModel's recipes: optimizer, schedule, steps, clipping, loss and compilation."""

from __future__ import annotations

import re
from dataclasses import replace

from automodel_ckpt.config.automodel.rows import (
    AUTOMODEL_DEFAULT,
    Degraded,
    Key,
    Needs,
    NoEffect,
    Section,
    Steps,
    apply_rows,
    is_of_automodel,
    is_true,
    switch,
    value_of,
)
from automodel_ckpt.config.tree.yaml_tree import Node

TE_ADAM = (
    "transformer_engine.pytorch.optimizers.FusedAdam",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
)
FLASH_ADAMW = "flashoptim.FlashAdamW"
_FUSED = "fused AdamW of torch is used, whose state has the data type of the weights"
ADAMW = {"torch.optim.AdamW": "", **dict.fromkeys((*TE_ADAM, FLASH_ADAMW), _FUSED)}
"""Optimizers that are AdamW, and what is used instead of them."""
OPTIMIZER = (
    Key("lr", default="0.001"),
    Key("betas"),
    Key("eps"),
    Key("epsilon", "eps"),
    Key("weight_decay"),
    NoEffect(
        "foreach",
        "fused",
        "capturable",
        "adam_w_mode",
        "bias_correction",
        "master_weights",
        "master_weight_bits",
        "master_weight_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "store_param_remainders",
        "compress_state_dict",
    ),
)


_REGEX = re.compile(r"(?P<start>\^?)(?P<body>(?:[A-Za-z0-9_.-]|\.\*|\\\.)+)(?P<end>\$?)")
_DEFAULT_DECAY = 0.01
"""The weight decay of AdamW in torch and in AutoModel."""
_GLOBS = {".*": "*", r"\.": ".", ".": "?"}


def _glob(regex: str) -> str:
    """The glob that matches the same names as a search for a regular expression; empty if there is none here."""
    found = _REGEX.fullmatch(regex)
    if found is None:
        return ""
    body = re.sub(r"\.\*|\\\.|\.", lambda part: _GLOBS[part[0]], found["body"])
    return ("" if found["start"] else "*") + body + ("" if found["end"] else "*")


def groups(section: Section) -> None:
    """Translate groups of parameters with multiples of the learning rate and of the weight decay.

    Both are numbers here, so the optimizer's own ones have been translated before.
    """
    overrides = section.take("param_group_overrides")
    if overrides is None:
        return
    hint = "write optimizer.groups: [{params: [GLOB], lr: NUMBER, weight_decay: NUMBER}]"
    made: list[Node] = []
    for entry in overrides.value if isinstance(overrides.value, list) else [overrides]:
        given = dict(entry.children()) if isinstance(entry.value, dict) else {}
        pattern = given.get("pattern")
        glob = _glob(str(pattern.value)) if pattern is not None else ""
        if pattern is None or not glob or set(given) - {"pattern", "lr_mult", "wd_mult"}:
            what = "this group of parameters cannot be translated"
            section.reject("param_group_overrides", entry, what, hint)
            continue
        group = {"params": Node([Node(glob, pattern.origin, quoted=True)], pattern.origin)}
        for name, ours in (("lr_mult", "lr"), ("wd_mult", "weight_decay")):
            base = value_of(section.work.result.at(f"optimizer.{ours}"))
            if base is None and ours == "weight_decay":
                base = _DEFAULT_DECAY
            factor = value_of(given[name]) if name in given else 1.0
            if isinstance(base, int | float) and isinstance(factor, int | float):
                number = float(f"{base * factor:.12g}")
                group[ours] = Node(repr(number), given.get(name, entry).origin)
            elif name in given:
                what = f"a multiple of the {ours} needs the {ours} as a number"
                section.reject(f"param_group_overrides.{name}", given[name], what, hint)
        made.append(Node(dict(group), entry.origin))
    if made:
        section.put("groups", Node(made, overrides.origin), was="param_group_overrides")


def optimizer(section: Section) -> None:
    """Translate the optimizer. AutoModel applies weight decay to all parameters, also to norms and biases."""
    node = section.peek("_target_")
    target = str(node.value) if node is not None else "torch.optim.AdamW"
    decay = section.peek("weight_decay")
    if target == "dion.Muon":
        assert node is not None
        muon(section, node)
        return
    _master_weights(section, target)
    is_penalty = target == "torch.optim.Adam"
    if target in TE_ADAM:
        _bias_correction(section)
        mode = section.peek("adam_w_mode")
        is_penalty = mode is not None and not switch(section, "adam_w_mode")
    if is_penalty and decay is not None and value_of(decay):
        _adam(section)
        return
    if target not in (*ADAMW, "torch.optim.Adam"):
        return
    section.take("_target_")
    if node is not None and ADAMW.get(target):
        section.degraded("_target_", node, ADAMW[target])
    elif node is not None:
        section.translated("_target_", node, "optimizer")
    if target in ("torch.optim.Adam", *TE_ADAM) and decay is None:
        section.put_default("weight_decay", "0.0")
    apply_rows(OPTIMIZER, section)
    groups(section)
    found = section.work.result.at("optimizer.weight_decay")
    if found is None or value_of(found):
        section.put_default("no_decay", "none")


def _master_weights(section: Section, target: str) -> None:
    """Keep the weights in float32 if the optimizer *target* keeps such a copy of them, as torch's optimizers do not.

    The forward pass computes in bfloat16 in both programs. Adapters are in float32 here anyway.
    """
    if target == FLASH_ADAMW:
        # 8 or 16 further bits of a bfloat16 weight; 24 bits in all are its default.
        name = "master_weight_bits"
        is_kept = not section.has(name) or section.peek(name) is not None
    else:
        name = "master_weights"
        is_kept = target in TE_ADAM and switch(section, name)
    result = section.work.result
    dtype = result.at("model.dtype")
    has_adapters = section.work.source.at("peft") is not None or result.at("peft") is not None
    is_ours_given = section.work.source.at("model.dtype") is not None
    if not is_kept or has_adapters or is_ours_given or dtype is None:
        return
    if dtype.is_flag or dtype.value == "float32":
        return
    node = section.peek(name)
    if node is None:
        name = "_target_"
        node = section.peek(name)
        assert node is not None
    root = section.work.section("")
    section.translated(name, node, "model.dtype")
    if name != "_target_":
        section.take(name)
    # Null is float32 for what is trained. With float32, frozen weights would not keep the 16 bits of their files.
    root.put("model.dtype", Node("null", node.origin))
    computed = result.at("distributed.mixed_precision")
    if computed is not None and computed.value == "none" and computed.origin == AUTOMODEL_DEFAULT:
        # With DDP, AutoModel computes in the data type of its weights, which are not the optimizer's copy.
        root.put_default("distributed.mixed_precision", "bfloat16")
    text = "trained weights are kept in float32 (model.dtype: null), and cast for each forward pass"
    section.note(name, node, text)


def _bias_correction(section: Section) -> None:
    """Reject Adam whose moments are not corrected for their start at 0."""
    node = section.peek("bias_correction")
    if node is not None and not switch(section, "bias_correction"):
        section.take("bias_correction")
        what = "Adam without bias correction is not supported"
        section.reject("bias_correction", node, what, "remove the key")


MUON = (
    NoEffect("_target_", "flatten", "use_triton", "scalar_opt"),
    Key("scalar_betas", "betas"),
    Key("scalar_eps", "eps"),
    Degraded(
        "adjust_lr",
        "torch.optim.Muon scales updates by sqrt(max(1, rows / columns))",
        when=lambda node: node.value == "spectral_norm",
    ),
    NoEffect("betas", "epsilon", "eps"),
)


def muon(section: Section, node: Node) -> None:
    """Translate dion's Muon: torch's for the hidden matrices, AdamW for the other parameters."""
    rate = section.take("lr") or Node("0.01", AUTOMODEL_DEFAULT)
    other = section.take("scalar_lr")
    group = {
        "params": Node([Node("hidden_matrices", node.origin)], node.origin),
        "_target_": Node("torch.optim.Muon", node.origin),
        "lr": rate,
    }
    for name, ours in (("mu", "momentum"), ("nesterov", "nesterov")):
        option = section.take(name)
        if option is not None:
            group[ours] = option
    decay = section.peek("weight_decay")
    if decay is not None:
        group["weight_decay"] = decay
    if section.peek("scalar_eps") is not None:
        # Otherwise the group would inherit it.
        group["eps"] = Node("1e-7", AUTOMODEL_DEFAULT)
    if other is not None:
        section.put("lr", other, was="scalar_lr")
    else:
        section.put("lr", rate)
    for name in ("embed_lr", "lm_head_lr"):
        option = section.take(name)
        if option is not None and value_of(option) != value_of(other or rate):
            section.degraded(name, option, "all parameters outside of matrices have one rate")
        elif option is not None:
            section.no_effect(name, option)
    section.put("groups", Node([Node(dict(group), node.origin)], node.origin), was="_target_")
    Key("weight_decay").apply(section)
    apply_rows(MUON, section)


def _adam(section: Section) -> None:
    """Translate Adam with weight decay, which is an L2 penalty and not the decay of AdamW."""
    node = section.take("_target_")
    assert node is not None
    if node.value in TE_ADAM:
        section.degraded("_target_", node, "Adam of torch is used")
        apply_rows(OPTIMIZER, section)
    section.put("_target_", replace(node, value="torch.optim.Adam"))
    names = ("lr", "betas", "eps", "weight_decay", "foreach", "fused", "amsgrad")
    apply_rows([Key(name) for name in names], section)
    groups(section)
    section.put_default("no_decay", "none")


SCHEDULE = (
    Key("lr_decay_steps", "decay_steps"),
    NoEffect("use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"),
    Degraded("init_lr", "the warmup begins at 0, or there is none"),
    Degraded("max_lr", "the peak is optimizer.lr"),
    Needs("start_wd", "a schedule of the weight decay", "set optimizer.weight_decay"),
    Needs("end_wd", "a schedule of the weight decay", "set optimizer.weight_decay"),
    NoEffect("wd_incr_steps", "wd_incr_style"),
)


def schedule(section: Section) -> None:
    """Translate the schedule of the learning rate. Without the section it is constant in both programs."""
    if section.node is None:
        return
    ours = section.peek("name")
    if ours is not None and section.peek("lr_decay_style") is None:
        return
    style = section.take("lr_decay_style", is_ours=False) or Node("cosine", AUTOMODEL_DEFAULT)
    lowest = section.take("min_lr", is_ours=False)
    warmup = section.take("lr_warmup_steps", is_ours=False)
    if style.value not in ("cosine", "linear", "constant"):
        hint = "set lr_scheduler.name (ckpt-train --help) instead of lr_decay_style"
        section.reject("lr_decay_style", style, "this schedule is not supported", hint)
    elif style.value == "constant":
        name = "constant_with_warmup"
        if warmup is not None and not value_of(warmup):
            name = "constant"
        section.put("name", replace(style, value=name), was="lr_decay_style")
        if lowest is not None:
            section.no_effect("min_lr", lowest)
        NoEffect("lr_decay_steps").apply(section)
    else:
        _decay(section, style, lowest)
    if warmup is not None:
        section.put("warmup_steps", warmup, was="lr_warmup_steps")
    elif section.work.source.at("lr_scheduler.warmup_ratio") is None:
        section.put_default("warmup_steps", "auto")
    if warmup is None or value_of(warmup):
        _first_rate(section)
    apply_rows(SCHEDULE, section)


def _first_rate(section: Section) -> None:
    """Write where the warmup begins: at AutoModel's init_lr, a tenth of the peak if none is given."""
    first = section.peek("init_lr")
    peak = value_of(section.work.result.at("optimizer.lr"))
    if first is None:
        section.put_default("warmup_from", "0.1")
        return
    number = value_of(first)
    if isinstance(number, int | float) and isinstance(peak, int | float) and 0 <= number < peak:
        section.take("init_lr")
        section.put("warmup_from", Node(repr(number / peak), first.origin), was="init_lr")


def _decay(section: Section, style: Node, lowest: Node | None) -> None:
    """Write a decay to AutoModel's lowest learning rate: a hundredth of the peak if none is given."""
    was = "min_lr"
    if lowest is None:
        peak = value_of(section.work.result.at("optimizer.lr"))
        number = peak / 100 if isinstance(peak, int | float) else 0.0
        lowest = Node(repr(number), AUTOMODEL_DEFAULT)
        was = ""
    if style.value == "cosine":
        section.put("name", replace(style, value="cosine_with_min_lr"), was="lr_decay_style")
        section.put("kwargs.min_lr", lowest, was=was)
        return
    section.put("name", replace(style, value="polynomial"), was="lr_decay_style")
    section.put("kwargs.lr_end", lowest, was=was)
    section.put("kwargs.power", Node("1.0", style.origin))


EPOCHS = Key("num_epochs", default="10")
STEPS = (
    Key("global_batch_size", default="32"),
    Key("max_steps"),
    EPOCHS,
    Key("ckpt_every_steps", default="100"),
    NoEffect(
        "gc_every_steps",
        "loss_average_window_steps",
        "start_step",
        "start_epoch",
    ),
    Degraded(
        "validate_on_checkpoint",
        "each checkpoint is validated if there is validation data",
        when=lambda node: not is_true(node),
    ),
)


def steps(section: Section) -> None:
    """Translate batch sizes and intervals. With pipeline stages, the size of their micro-batches is used."""
    size = section.peek("local_batch_size")
    has_stages = section.work.result.at("step_scheduler.local_batch_size") is not None
    if has_stages and size is not None and not size.is_flag:
        NoEffect("local_batch_size").apply(section)
    Key("local_batch_size").apply(section)
    is_repeated = _is_repeated(section)
    if is_repeated:
        _drop_epochs(section)
    apply_rows([row for row in STEPS if not (is_repeated and row == EPOCHS)], section)
    # Without either, AutoModel trains for 10 epochs, also if both keys are null in the file.
    ours = section.work.result
    if not any(ours.at(f"step_scheduler.{name}") for name in ("num_epochs", "max_steps")):
        section.put_default("num_epochs", "10")
    every_epoch = section.take("save_checkpoint_every_epoch", is_ours=False)
    if is_repeated:
        # All steps are one epoch there, whose end is the end of the run.
        section.put_default("ckpt_every_epochs", "null")
        if every_epoch is not None:
            section.no_effect("save_checkpoint_every_epoch", every_epoch)
    elif every_epoch is not None:
        # Null steps mean the steps of an epoch.
        has_steps = ours.at("step_scheduler.ckpt_every_steps") is not None
        value = "1" if is_true(every_epoch) or not has_steps else "null"
        node = Node(value, every_epoch.origin)
        section.put("ckpt_every_epochs", node, was="save_checkpoint_every_epoch")
    signals = section.take("preemption_signal")
    if signals is not None:
        if isinstance(signals.value, str):
            signals = Node([signals], signals.origin)
        section.put("stop_signals", signals, was="preemption_signal")
    # There is nothing to validate on: ours would be an error.
    if _has_validation(section):
        Key("val_every_steps").apply(section)
    else:
        NoEffect("val_every_steps").apply(section)


def _is_repeated(section: Section) -> bool:
    """Whether AutoModel repeats the training data until ``max_steps``, whatever the number of epochs is.

    Its streams and the samples of nanoGPT's files never end (``nanogpt_dataset.py``), and Megatron's samples are as
    many as the steps need (``megatron_dataset.py``).
    """
    target = section.work.result.at("dataset._target_")
    are_tokens = target is not None and str(target.value).endswith(
        (".token_files.megatron", ".token_files.nanogpt")
    )
    is_stream = is_true(section.work.result.at("dataset.streaming"))
    steps = section.peek("max_steps")
    return (are_tokens or is_stream) and steps is not None and not steps.is_null


def _drop_epochs(section: Section) -> None:
    """Leave the number of epochs out of a recipe whose data are repeated, unless a flag of the command states it."""
    node = section.peek("num_epochs")
    if node is not None and node.is_flag:
        section.take("num_epochs")
        section.put("num_epochs", node)
        return
    section.take("num_epochs")
    section.put_default("num_epochs", "null")
    if node is not None:
        text = "max_steps ends the run; the data are repeated until then, as in AutoModel"
        section.note("num_epochs", node, text)


def _has_validation(section: Section) -> bool:
    """Whether the recipe has validation data, translated or the user's own."""
    work = section.work
    names = ("validation_dataset", "validation_datasets")
    found = [tree.at(name) for tree in (work.result, work.source) for name in names]
    return any(node is not None and not node.is_null for node in found)


def clipping(section: Section) -> None:
    """Translate the section clip_grad_norm, which is a number here."""
    if section.node is None:
        return
    norm = section.take("max_norm")
    if norm is not None:
        section.work.section("").put("clip_grad_norm", norm)


LOSSES = (
    "loss.masked_ce.MaskedCrossEntropy",
    "loss.linear_ce.FusedLinearCrossEntropy",
    "loss.te_parallel_ce.TEParallelCrossEntropy",
    "loss.chunked_ce.ChunkedCrossEntropy",
    "models.gemma4_moe.loss.Gemma4TensorParallelFusedLinearCrossEntropy",
)
"""Implementations of the cross-entropy of labeled tokens, below nemo_automodel.components."""


def loss(section: Section) -> None:
    """Translate the loss. Ours is the cross-entropy, computed in chunks of the labeled tokens."""
    node = section.peek("_target_")
    if node is None or not is_of_automodel(str(node.value)):
        return
    whole = section.work.section("").take("loss_fn")
    assert whole is not None
    if str(node.value).removeprefix("nemo_automodel.components.") in LOSSES:
        section.no_effect("_target_", node)
        for name, child in whole.children():
            if name != "_target_":
                section.no_effect(name, child)
        return
    hint = "remove loss_fn to train with cross-entropy"
    section.reject("_target_", node, "this loss is not supported", hint)


def compilation(section: Section) -> None:
    """Translate torch.compile. The keys of a disabled section would be an error here."""
    if section.node is None:
        return
    if not switch(section, "enabled"):
        NoEffect("enabled", "mode", "backend", "fullgraph", "dynamic").apply(section)
        return
    apply_rows(
        (
            Key("enabled"),
            Key("mode", words={"default": ""}),
            Key("backend"),
            Key("fullgraph"),
            Key("dynamic"),
        ),
        section,
    )


ROWS = (
    ("optimizer", Steps(optimizer)),
    ("lr_scheduler", Steps(schedule)),
    ("step_scheduler", Steps(steps)),
    ("clip_grad_norm", Steps(clipping)),
    ("loss_fn", Steps(loss)),
    ("compile", Steps(compilation)),
)
