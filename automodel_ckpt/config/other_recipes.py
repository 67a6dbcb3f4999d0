"""Translate recipe files of axolotl, LLaMA-Factory and TRL for ``ckpt-train --convert-recipe``.

``other_names.OTHER_NAMES`` renames most keys. Functions here translate keys that depend on each other, and write the
defaults of a program that differ from ours. Every other key is reported, in one line. Facts about the programs are of
axolotl 0.12, LLaMA-Factory 0.9 and TRL 0.24.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from automodel_ckpt.config.automodel.rows import Section, Work, is_enabled, is_true, put, value_of
from automodel_ckpt.config.keys.monitoring import RECIPE_OPTIONS, TRACKERS
from automodel_ckpt.config.other_names import OTHER_NAMES
from automodel_ckpt.config.schema import RecipeConfig
from automodel_ckpt.config.schema_keys import annotation_at
from automodel_ckpt.config.tree.yaml_tree import Node, read_file
from automodel_ckpt.errors import RecipeError

AXOLOTL, FACTORY, TRL = "axolotl", "LLaMA-Factory", "TRL"
_MARKS = {
    AXOLOTL: ("base_model", "datasets adapter micro_batch_size"),
    FACTORY: ("model_name_or_path", "stage finetuning_type template dataset_dir"),
    TRL: ("model_name_or_path", "dataset_name dataset_text_field use_peft"),
}
"""A key that the files of each program have, and keys of which they have at least one."""
_TRAINER = {
    "optimizer.lr": "5e-5",
    "optimizer.weight_decay": "0.0",
    "lr_scheduler.name": "linear",
    "step_scheduler.num_epochs": "3",
    "step_scheduler.local_batch_size": "8",
    "step_scheduler.ckpt_every_steps": "500",
    "dataset.truncation": "right",
}
_DEFAULTS = {
    AXOLOTL: {
        "optimizer.weight_decay": "0.0",
        "lr_scheduler.name": "cosine",
        "step_scheduler.num_epochs": "1",
        "step_scheduler.local_batch_size": "1",
        "dataset.seq_length": "512",
        "dataset.truncation": "skip",
    },
    FACTORY: {**_TRAINER, "dataset.seq_length": "2048"},
    TRL: {
        **_TRAINER,
        "dataset.seq_length": "1024",
        "peft.r": "16",
        "peft.alpha": "32",
        "peft.dropout": "0.05",
    },
}
"""The defaults of each program that change results and differ from ours."""
_KINDS = {
    "sft": "llm_finetune",
    "pt": "pretrain",
    "rm": "reward_model",
    "ipo": "dpo",
    **{name: name for name in ("llm_finetune", "pretrain", "dpo", "kto", "orpo", "reward_model")},
}
"""Kinds of training there -> recipes here."""
_BUILDERS = {
    "llm_finetune": "chat.messages",
    "pretrain": "text.text",
    "kto": "kto.judged_completions",
    **dict.fromkeys(("dpo", "orpo", "reward_model"), "preference.pairs"),
}
_TABLE = """
weight_decay -> /optimizer.weight_decay
seed
~ chat_template not in tokenizer_default jinja: the tokenizer's own is used; dataset.chat_template takes a Jinja file
~ chat_template_jinja: dataset.chat_template takes such a template
~ template: the tokenizer's own is used; dataset.chat_template takes a Jinja file
~ train_on_inputs: prompts have labels there; here, only answers have
~ train_on_prompt: prompts have labels there; here, only answers have
~ assistant_only_loss in false: prompts have labels there; here, only answers have
~ completion_only_loss in false: prompts have labels there; here, only answers have
~ save_strategy in no: checkpoint.enabled: false saves nothing
~ saves_per_epoch not in 0 1: set step_scheduler.ckpt_every_steps to this part of an epoch
~ evals_per_epoch not in 0 1: set step_scheduler.val_every_steps to this part of an epoch
- eval_strategy evaluation_strategy strict debug local_rank dataset_prepared_path pad_to_sequence_len
- eval_sample_packing model_type tokenizer_type tokenizer_use_fast gradient_checkpointing_kwargs lora_fan_in_fan_out
- lora_mlp_kernel lora_qkv_kernel lora_o_kernel liger_rope liger_rms_norm liger_glu_activation liger_layer_norm
- liger_fused_linear_cross_entropy do_train do_eval do_predict overwrite_cache overwrite_output_dir plot_loss
- preprocessing_num_workers dataset_num_proc dataset_processes use_fast_tokenizer ddp_find_unused_parameters
- remove_unused_columns lora_task_type logging_dir logging_first_step logging_strategy disable_tqdm wandb_watch
- wandb_log_model eval_table_size
"""
"""Keys without a function, in the form of ``automodel/rows.py``, in addition to the names in ``other_names.py``."""
_ENTRY = """
- ds_type
~ chat_template not in tokenizer_default: the tokenizer's own is used; dataset.chat_template takes a Jinja file
"""
_SAME = ("[assistant]", "turn", "{role: role, content: content}", "{role: from, content: value}")
"""Values of a data set of axolotl that state what happens here, too."""
_AS_ALPACA = (
    "Below is an instruction that describes a task{% if input %}, paired with an input that provides further context"
    "{% endif %}. Write a response that appropriately completes the request.\n\n### Instruction:\n{{ instruction }}\n\n"
    "{% if input %}### Input:\n{{ input }}\n\n{% endif %}### Response:\n"
)
_FIELDS = {
    "chat.messages": "messages:messages_field",
    "text.text": "prompt:field",
    "text.prompt_completion": "response:completion_field system:system_field",
    "preference.pairs": "prompt:prompt_field messages:prompt_field chosen:chosen_field rejected:rejected_field",
    "kto.judged_completions": "prompt:prompt_field completion:completion_field response:completion_field "
    "label:label_field kto_tag:label_field",
}
"""The fields of rows there (axolotl: with field_ before them), and the arguments of our builders."""
_ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
_ATTENTIONS = {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager"}
_PREFERENCES = """
rl_beta:beta dpo_beta:beta pref_beta:beta orpo_alpha:beta beta pref_loss:loss loss_type:loss
dpo_label_smoothing:label_smoothing label_smoothing
"""
_WANDB = " ".join(f"wandb_{name}:{name}" for name in RECIPE_OPTIONS["wandb"])


@dataclass
class Conversion(Work):
    """The translation of one file of *program* for *num_ranks* ranks.

    *renamed* has the places of keys with values that ours may reject, and *rejected* those that were rejected, and why.
    """

    program: str = ""
    num_ranks: int = 1
    rejected: Mapping[str, str] = field(default_factory=dict)
    renamed: set[str] = field(default_factory=set)

    def default(self, key: str) -> Node:
        """Return the program's default of a key of ours."""
        return Node(_DEFAULTS[self.program][key], f"default of {self.program}")

    def made(self, value: str) -> Node:
        """Return a value that is not the value of one key of the file."""
        return Node(value, self.source.origin)

    def move(self, name: str, node: Node, key: str, why: str = "no equivalent") -> None:
        """Give the value of the key *name* to ours, or report *why* it is not."""
        section = self.section("")
        is_free = section.ours(key) is None and annotation_at(RecipeConfig, key) is not None
        if is_free and node.origin not in self.rejected:
            section.put_root(key, node)
            self.renamed.add(node.origin)
        else:
            reason = self.rejected.get(node.origin)
            section.degraded(name, node, f"{why} ({reason})" if reason else why)


def program_of(root: Node) -> str | None:
    """Return the program with recipe files such as the tree *root*. Returns None for other files."""
    for program, (name, others) in _MARKS.items():
        if root.at(name) is not None and any(
            root.at(other) is not None for other in others.split()
        ):
            return program
    return None


def translate(
    root: Node, program: str, recipe: str | None, num_ranks: int, rejected: Mapping[str, str]
) -> Conversion:
    """Translate the tree of a file, which is not modified.

    Args:
        root: The tree of the file.
        program: What :func:`program_of` returned.
        recipe: The kind of training. None: what the file states.
        num_ranks: The number of ranks that the global batch is for.
        rejected: Places of keys that are reported instead of renamed, with the reasons.

    Returns:
        The translation: ``result`` is the tree of our recipe, ``notices`` are what to report.

    Raises:
        RecipeError: for a kind of training that does not exist here, and for batch sizes that are no numbers.
    """
    work = Conversion(root.copy(), "", program=program, num_ranks=num_ranks, rejected=rejected)
    section = work.section("")
    kind = _kind(section, work, recipe)
    work.recipe = str(kind.value)
    section.put("recipe", kind)
    for step in (_model, _adapters, _data, _optimizer, _batches, _schedule, _saves, _trackers):
        step(section, work)
    for pair in _PREFERENCES.split():
        name, _, ours = pair.partition(":")
        node = section.take(name)
        if node is not None and node.value not in ("orpo", "nll"):
            work.move(name, node, f"{work.recipe}.{ours or name}")
    section.apply(_TABLE)
    _others(section, work)
    for key in _DEFAULTS[program]:
        parent = key.partition(".")[0]
        is_used = parent in ("optimizer", "lr_scheduler") or section.ours("peft") is not None
        if is_used and parent not in ("step_scheduler", "dataset") and section.ours(key) is None:
            section.put_root(key, work.default(key))
    shown = {node.origin for _, node in work.result.walk()} | {each.origin for each in work.notices}
    for name, node in root.children():
        if not node.is_null and shown.isdisjoint(each.origin for _, each in node.walk()):
            section.no_effect(name, node)
    return work


def _first(section: Section, *names: str) -> tuple[str, Node | None]:
    """Remove keys of one meaning. Return the first of them that has a value, with its name."""
    found: tuple[str, Node | None] = (names[0], None)
    for name in reversed(names):
        node = section.take(name)
        found = found if node is None else (name, node)
    return found


def _moved(section: Section, names: str, *, keep: bool = False) -> dict[str, Node]:
    """Return keys of a section, and remove them unless *keep*. *names* are names there and, after a colon, here."""
    found = {}
    for pair in names.split():
        name, _, ours = pair.partition(":")
        node = section.peek(name) if keep else section.take(name)
        if node is not None:
            found[ours or name] = node
    return found


def _number(node: Node) -> float:
    """Return the number of a node. Raises :class:`RecipeError` for other values."""
    number = value_of(node)
    if isinstance(number, int | float):
        return number
    raise RecipeError("must be a number", where=node.origin, value=str(node), hint="correct it")


def _listed(node: Node) -> Node:
    """Return a list, or a text with commas, as a list."""
    if not isinstance(node.value, str):
        return node
    return replace(node, value=[Node(word.strip(), node.origin) for word in node.value.split(",")])


def _kind(section: Section, work: Conversion, recipe: str | None) -> Node:
    """Return our recipe for the file's kind of training, which files of TRL do not state."""
    name, node = _first(section, "stage", "rl")
    node = node or work.made("sft")
    text = recipe or str(node.value)
    if section.text("pref_loss") == "orpo":
        text = "orpo"
    if text not in _KINDS:
        hint = f"there are {', '.join(_KINDS)}"
        raise RecipeError(f"{name}: no such training", where=node.origin, value=text, hint=hint)
    if text == "ipo":
        section.put_root("dpo.loss", work.made("ipo"))
    if work.program == TRL and recipe is None:
        why = "sft, because TRL's files do not state it; for others, add --recipe dpo, kto or reward_model"
        section.note("recipe", work.made(""), why)
    return replace(node, value=_KINDS[text])


def _model(section: Section, work: Conversion) -> None:
    """Translate attention, precision and sharding."""
    trusted = section.flag("trust_remote_code")
    if trusted is not None:
        section.put_root("model.trust_remote_code", trusted)
        section.note("trust_remote_code", trusted, "also needs --trust trust_remote_code")
    name, node = _first(section, "flash_attention", "sdp_attention", "flash_attn")
    word = {"flash_attention": "fa2", "sdp_attention": "sdpa"}.get(name, str(node and node.value))
    if node is not None and is_enabled(node) and word in _ATTENTIONS:
        ours = replace(node, value=_ATTENTIONS[word])
        section.put_root("model.attn_implementation", ours)
    bf16, fp16 = section.take("bf16"), section.take("fp16")
    if fp16 is not None and is_true(fp16):
        section.degraded("fp16", fp16, "float16 needs a loss scaler: bfloat16 is used")
        bf16 = fp16
    if bf16 is not None and bf16.value == "full":
        section.degraded("bf16", bf16, "weights stay in float32, unless model.dtype is bfloat16")
    if bf16 is not None and bf16.value != "auto":
        ours = replace(bf16, value="bfloat16" if is_enabled(bf16) else "none")
        section.put_root("distributed.mixed_precision", ours)


def _adapters(section: Section, work: Conversion) -> None:
    """Translate LoRA and QLoRA, and what shards the model. LLaMA-Factory trains adapters by default."""
    name, kind = _first(section, "adapter", "finetuning_type", "use_peft")
    method = str(kind.value).lower() if kind is not None else "lora" * (work.program == FACTORY)
    bits = _moved(section, "load_in_8bit load_in_4bit quantization_bit")
    bits = {name: node for name, node in bits.items() if is_enabled(node)}
    is_quantized = bool(bits) or method == "qlora"
    if method in ("lora", "qlora", "true"):
        kind = kind or Node("lora", f"default of {work.program}")
        section.put_root("peft.method", replace(kind, value="lora"))
        _layers(section, work)
        word = section.take("bnb_4bit_quant_type") or replace(kind, value="nf4")
        for bit_name, node in bits.items():
            is_8 = bit_name == "load_in_8bit" or node.value == "8"
            word = replace(node, value="int8" if is_8 else word.value)
        if is_quantized:
            section.put_root("peft.quantize_base", word)
    else:
        if kind is not None and method not in ("full", "false"):
            section.degraded(name, kind, "no equivalent: all weights are trained")
        for other in section.names():
            if other.startswith(("lora_", "peft_", "use_dora", "use_rslora", "additional_target")):
                section.drop(other)
    for name, node in _moved(section, "deepspeed fsdp fsdp_config fsdp_version").items():
        if is_quantized:
            section.degraded(name, node, "each rank has the whole quantized base (DDP)")
        elif is_enabled(node):
            section.put_root("distributed.strategy", replace(node, value="fsdp2"))
            section.note(name, node, "FSDP2 shards; distributed.cpu_offload: true offloads")


def _layers(section: Section, work: Conversion) -> None:
    """Translate the layers that have adapters. The default of peft is the queries and values of most models."""
    linear = section.flag("lora_target_linear")
    _, target = _first(section, "lora_target_modules", "lora_target")
    rank = section.peek("lora_rank")
    default = Node("q_proj, v_proj", f"default of {work.program}")
    if work.program == FACTORY:
        default.value = "all"
        if section.peek("lora_alpha") is None:
            alpha = 2 * _number(rank or work.made("8"))
            section.put_root("peft.alpha", replace(default, value=str(alpha)))
    target = linear or target or default
    is_all = linear is not None or target.value in ("all", "all-linear")
    target = replace(target, value="all-linear") if is_all else _listed(target)
    section.put_root("peft.target_modules", target)
    _, saved = _first(section, "lora_modules_to_save", "additional_target")
    if saved is not None:
        section.put_root("peft.modules_to_save", _listed(saved))


def _data(section: Section, work: Conversion) -> None:
    """Translate the training data and the validation data, with the length of samples and packing."""
    _, length = _first(section, "sequence_len", "cutoff_len", "max_seq_length", "max_length")
    length = length or work.default("dataset.seq_length")
    build = {AXOLOTL: _of_axolotl, FACTORY: _of_factory, TRL: _of_trl}[work.program]
    sets, tests = (list(build(section, work, is_test)) for is_test in (False, True))
    name, share = _first(section, "val_set_size", "val_size")
    part = 0 if share is None else _number(share)
    if share is not None and part:
        cut = f"{round(100 * (1 - part))}%" if part < 1 else f"-{part}"
        for one in sets:
            split = one.get("split", work.made("train")).value
            tests.append({**one, "split": replace(share, value=f"{split}[{cut}:]")})
            one["split"] = replace(share, value=f"{split}[:{cut}]")
        section.note(name, share, "the last rows, instead of random ones")
    shared = {"seq_length": length, "truncation": work.default("dataset.truncation")}
    for key, each in (("dataset", sets), ("validation_dataset", tests)):
        if len(each) > 1:
            section.put_root(f"{key}._target_", work.made("automodel_ckpt.data.mixture.mixture"))
        for number, one in enumerate(each):
            node = Node({**one, **shared}, work.source.origin)
            section.put_root(key if len(each) == 1 else f"{key}.sources.set{number}", node)
    name, packing = _first(section, "sample_packing", "neat_packing", "packing")
    if packing is not None and is_true(packing):
        section.put_root("packed_sequence.size", replace(length, origin=packing.origin))
        section.note(name, packing, "the samples of a pack do not see each other")


def _set(work: Conversion, builder: str, *parts: Mapping[str, Node]) -> dict[str, Node]:
    """Return the section of a data set. Texts of axolotl and LLaMA-Factory become messages."""
    made = {"_target_": work.made(f"automodel_ckpt.data.{builder}")}
    if work.program != TRL and builder not in ("chat.messages", "text.text"):
        made["as_chat"] = work.made("true")
    for part in parts:
        made |= part
    return made


def _of_axolotl(section: Section, work: Conversion, is_test: bool) -> Iterator[dict[str, Node]]:
    """Translate the entries of datasets or test_datasets."""
    name = "test_datasets" if is_test else "datasets"
    entries = section.peek(name)
    for number, _ in enumerate(entries.children() if entries is not None else ()):
        entry = section.inner(f"{name}.{number}")
        given = _moved(entry, "path data_files:path name split revision")
        kind = entry.take("type") or work.made("chat_template")
        word = re.split("[:.]", str(kind))[0]
        builder = _BUILDERS[work.recipe]
        if work.recipe != "llm_finetune":
            entry.note(
                "type", kind, "the tokenizer's chat template is used; look at --show-samples"
            )
        elif word == "alpaca":
            builder = "text.prompt_completion"
            fields = {"prompt_field": _AS_ALPACA, "completion_field": "output", "as_chat": "false"}
            given |= {ours: work.made(text) for ours, text in fields.items()}
        elif word == "completion":
            builder = "text.text"
            given |= _moved(entry, "field")
        elif word not in ("chat_template", "sharegpt"):
            text = (
                "no equivalent: use text.prompt_completion with prompt_field and completion_field"
            )
            entry.degraded("type", kind, text)
        names = " ".join(f"field_{pair}" for pair in _FIELDS[builder].split())
        yield _set(work, builder, given, _moved(entry, names))
        entry.apply(_ENTRY)
        for rest, node in _moved(entry, " ".join(entry.names())).items():
            if str(node) in _SAME:
                entry.no_effect(rest, node)
            else:
                entry.degraded(rest, node, "no equivalent; look at --show-samples")
    section.take(name)


def _of_factory(section: Section, work: Conversion, is_test: bool) -> Iterator[dict[str, Node]]:
    """Translate the names of data sets, which a file dataset_info.json describes."""
    folder = section.text("dataset_dir") or "data"
    described = read_file(Path(folder, "dataset_info.json"), []) or Node({}, "")
    named = section.take("eval_dataset" if is_test else "dataset")
    most = _moved(section, "max_samples", keep=not is_test)
    for _, name in _listed(named).children() if named is not None else ():
        entry = dict(described.children()).get(str(name.value))
        if entry is None:
            text = f"not in {folder}/dataset_info.json: correct path and fields"
            section.degraded("dataset", name, text)
            entry = Node({"file_name": Node(f"{name.value}.json", "")}, "")
        yield _set(work, *_described(work, entry, folder), most)
    if is_test:
        section.take("dataset_dir")


def _described(work: Conversion, entry: Node, folder: str) -> tuple[str, dict[str, Node]]:
    """Return our builder and its arguments for an entry of dataset_info.json."""
    found = {name: str(node.value) for name, node in entry.children()}
    columns = entry.at("columns")
    names = {"prompt": "instruction", "query": "input", "response": "output"}
    if columns is not None:
        names = {name: str(node.value) for name, node in columns.children()}
    builder = _BUILDERS[work.recipe]
    made = {"path": found.get("hf_hub_url") or f"{folder}/{found.get('file_name')}"}
    made |= {
        ours: found[name]
        for name, ours in (("subset", "name"), ("split", "split"))
        if name in found
    }
    if found.get("formatting") == "sharegpt":
        names = {"messages": "conversations", **names}
    elif work.recipe != "pretrain":
        builder = "text.prompt_completion" if work.recipe == "llm_finetune" else builder
        prompt = f"{{{{ {names.pop('prompt')} }}}}"
        if "query" in names:
            prompt += f"{{% if {names['query']} %}}\n{{{{ {names['query']} }}}}{{% endif %}}"
        made["prompt_field"] = prompt
    for pair in _FIELDS[builder].split():
        name, _, ours = pair.partition(":")
        if name in names:
            made[ours] = names[name]
    return builder, {name: work.made(text) for name, text in made.items()}


def _of_trl(section: Section, work: Conversion, is_test: bool) -> Iterator[dict[str, Node]]:
    """Translate the arguments of TRL's scripts."""
    text = _moved(section, "dataset_text_field:field", keep=not is_test)
    given = _moved(section, "dataset_name:path dataset_config:name", keep=not is_test)
    builder = "text.text" if text and work.recipe == "llm_finetune" else _BUILDERS[work.recipe]
    if is_test:
        given["split"] = section.take("dataset_test_split") or work.made("test")
    else:
        given |= _moved(section, "dataset_streaming:streaming dataset_train_split:split")
        text_here = f"read by data.{builder}; other builders read text, or prompts with completions"
        section.note("dataset_name", given.get("path") or work.made(""), text_here)
        only = section.peek("assistant_only_loss") or section.peek("completion_only_loss")
        if builder == "chat.messages" and only is None:
            put(work.source, "assistant_only_loss", work.made("false"))
    if "path" in given and not (is_test and section.text("eval_strategy") in ("", "no")):
        yield _set(work, builder, given, text if builder == "text.text" else {})


def _optimizer(section: Section, work: Conversion) -> None:
    name, node = _first(section, "optimizer", "optim")
    if node is not None and node.value in _8BIT:
        ours = replace(node, value="automodel_ckpt.optim.adam8bit.AdamW8bit")
        section.put_root("optimizer._target_", ours)
    elif node is not None and node.value not in _ADAMW:
        section.degraded(name, node, "AdamW is used; optimizer._target_ takes other classes")
    if work.program == TRL and section.peek("learning_rate") is None:
        rate = {"llm_finetune": "2e-5", "reward_model": "1e-4"}.get(work.recipe, "1e-6")
        section.put_root("optimizer.lr", Node(rate, f"default of {TRL}"))


def _batches(section: Section, work: Conversion) -> None:
    """Translate batch sizes and the length of training."""
    _, local = _first(section, "micro_batch_size", "per_device_train_batch_size")
    local = local or work.default("step_scheduler.local_batch_size")
    name = "gradient_accumulation_steps"
    accumulated = section.take(name) or work.made("1")
    samples = _number(local) * _number(accumulated) * work.num_ranks
    section.put_root("step_scheduler.global_batch_size", work.made(str(samples)))
    section.put_root("step_scheduler.local_batch_size", local)
    text = (
        f"global_batch_size is {local} x {accumulated} accumulated x {work.num_ranks} ranks; add "
    )
    section.note(name, accumulated, f"{text}--nproc-per-node N to --convert-recipe for N ranks")
    steps = section.take("max_steps")
    name, epochs = _first(section, "num_epochs", "num_train_epochs")
    epochs = epochs or work.default("step_scheduler.num_epochs")
    number = _number(epochs)
    if steps is not None and _number(steps) > 0:
        section.put_root("step_scheduler.max_steps", steps)
    else:
        whole = str(int(number)) if number == int(number) else epochs.value
        hint = "set step_scheduler.max_steps"
        work.move(name, replace(epochs, value=whole), "step_scheduler.num_epochs", hint)


def _schedule(section: Section, work: Conversion) -> None:
    """Translate the schedule of the learning rate. A ratio is used if there is no number of steps."""
    name, node = _first(section, "lr_scheduler", "lr_scheduler_type")
    if node is not None:
        work.move(name, node, "lr_scheduler.name")
    steps, ratio = section.take("warmup_steps"), section.take("warmup_ratio")
    if steps is not None and (_number(steps) or ratio is None):
        work.move("warmup_steps", steps, "lr_scheduler.warmup_steps")
    elif ratio is not None:
        section.put_root("lr_scheduler.warmup_ratio", ratio)
    elif work.program == AXOLOTL:
        section.put_root("lr_scheduler.warmup_ratio", Node("0.03", f"default of {AXOLOTL}"))


def _saves(section: Section, work: Conversion) -> None:
    """Translate when to save and to validate. Each end of an epoch is saved, and each checkpoint validated, anyway."""
    for word, name in (("save", "ckpt_every_steps"), ("eval", "val_every_steps")):
        key = f"step_scheduler.{name}"
        steps = section.take(f"{word}_steps")
        is_wanted = section.text(f"{word}_strategy") in ("", "steps")
        is_useful = word == "save" or section.ours("validation_dataset") is not None
        if steps is None and key in _DEFAULTS[work.program]:
            steps = work.default(key)
        if steps is not None and is_wanted and is_useful:
            work.move(f"{word}_steps", steps, key, f"here: {key}")
        elif steps is not None:
            section.no_effect(f"{word}_steps", steps)


def _trackers(section: Section, work: Conversion) -> None:
    """Translate trackers. axolotl uses Weights & Biases if there is a project."""
    node = section.take("report_to")
    names = [str(each.value) for _, each in _listed(node).children()] if node is not None else []
    given = _moved(section, _WANDB)
    if is_true(section.take("use_wandb")) or (work.program == AXOLOTL and "project" in given):
        names.append("wandb")
    for name in names:
        options = dict(given) if name == "wandb" else {}
        if name in TRACKERS:
            section.put_root(f"logging.trackers.{name}", Node({**options}, work.source.origin))
        elif name not in ("none", "all"):
            section.degraded("report_to", work.made(name), f"there are {', '.join(TRACKERS)}")


def _others(section: Section, work: Conversion) -> None:
    """Rename the other keys, or report them."""
    for name, node in _moved(section, " ".join(section.names())).items():
        known = OTHER_NAMES.get(name)
        if known is None:
            section.degraded(name, node, "no equivalent")
            continue
        word = known.values.get(str(node.value).lower(), "" if known.values else node.value)
        if len(known.keys) == 1 and not known.note and word:
            work.move(name, replace(node, value=word), known.keys[0], known.hint(str(node)))
        elif is_enabled(node):
            section.degraded(name, node, known.hint(str(node)))
        else:
            section.no_effect(name, node)
