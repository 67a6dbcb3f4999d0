"""Translate recipe files of axolotl, LLaMA-Factory and TRL for ``ckpt-train --convert-recipe``.

``other_names.OTHER_NAMES`` renames most keys. Functions here translate keys that depend on each other, and write the
defaults of a program that differ from ours. Every other key is reported, in one line. Facts about the programs are of
axolotl 0.12, LLaMA-Factory 0.9 and TRL 0.24.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from automodel_ckpt.config.automodel.rows import Section, Work, is_enabled, is_true, put, value_of
from automodel_ckpt.config.other_names import AXOLOTL, FACTORY, OTHER_NAMES, TRL
from automodel_ckpt.config.tree.yaml_tree import Node, read_file
from automodel_ckpt.errors import RecipeError

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
_BUILDERS = {
    "llm_finetune": "chat.messages",
    "pretrain": "text.text",
    "kto": "kto.judged_completions",
    **dict.fromkeys(("dpo", "orpo", "reward_model"), "preference.pairs"),
}
_KINDS = {
    name: recipe
    for name, recipe in {**OTHER_NAMES["stage"].values, "ipo": "dpo"}.items()
    if recipe in _BUILDERS
}
_KINDS |= {recipe: recipe for recipe in _BUILDERS}
"""Kinds of training there, and recipes here -> recipes here."""
_TYPES = {
    "chat_template": "chat.messages",
    "sharegpt": "chat.messages",
    "alpaca": "text.prompt_completion",
    "completion": "text.text",
}
"""The types of axolotl's data sets -> our builders."""
_TABLE = """
weight_decay -> /optimizer.weight_decay
seed
~ chat_template not in tokenizer_default jinja: the tokenizer's own is used; dataset.chat_template takes a Jinja file
~ chat_template_jinja: dataset.chat_template takes such a template
lr_scheduler -> /lr_scheduler.name
~ template: the tokenizer's own is used; dataset.chat_template takes a Jinja file
~ train_on_inputs: prompts have labels there; here, only answers have
~ train_on_prompt: prompts have labels there; here, only answers have
~ assistant_only_loss in false: prompts have labels there; here, only answers have
~ completion_only_loss in false: prompts have labels there; here, only answers have
~ deepspeed: several ranks shard the model by FSDP2 (a quantized base: DDP); distributed.cpu_offload: true offloads
~ fsdp: several ranks shard the model by FSDP2 (a quantized base: DDP)
- fsdp_config fsdp_version
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
_ALPACA = {
    "prompt_field": "Below is an instruction that describes a task{% if input %}, paired with an input that provides "
    "further context{% endif %}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{{ instruction }}\n\n"
    "{% if input %}### Input:\n{{ input }}\n\n{% endif %}### Response:\n",
    "completion_field": "output",
    "as_chat": "false",
}
"""The arguments of text.prompt_completion for axolotl's type alpaca."""
_OF_ALL_SETS = "max_samples dataset_dir dataset_text_field dataset_name dataset_config"
_OF_HUB = {"subset": "name", "split": "split"}
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
_PREFERENCES = """
rl_beta:beta dpo_beta:beta pref_beta:beta orpo_alpha:beta beta pref_loss:loss loss_type:loss
dpo_label_smoothing:label_smoothing label_smoothing
"""


@dataclass
class Conversion(Work):
    """The translation of one file of *program* for *num_ranks* ranks."""

    program: str = ""
    num_ranks: int = 1

    def default(self, key: str) -> Node:
        """Return the program's default of a key of ours."""
        return self.of_program(_DEFAULTS[self.program][key])

    def of_program(self, value: str) -> Node:
        """Return a value that the program uses where the file has none."""
        return Node(value, f"default of {self.program}")

    def made(self, value: str) -> Node:
        """Return a value that is not the value of one key of the file."""
        return Node(value, self.source.origin)


def translate(
    root: Node, program: str, recipe: str | None, num_ranks: int, rejected: Mapping[str, str]
) -> Conversion:
    """Translate the tree of a file, which is not modified.

    Args:
        root: The tree of the file.
        program: What :func:`~automodel_ckpt.config.other_names.program_of` returned.
        recipe: The kind of training. None: what the file states.
        num_ranks: The number of ranks that the global batch is for.
        rejected: Places of keys that are reported instead of translated, with the reasons.

    Returns:
        The translation: ``result`` is the tree of our recipe, ``notices`` are what to report.

    Raises:
        RecipeError: for a kind of training that does not exist here, and for batch sizes that are no numbers.
    """
    work = Conversion(root.copy(), "", program=program, num_ranks=num_ranks)
    section = work.section("")
    for name, node in root.children():
        if node.origin in rejected:
            section.take(name)
            section.degraded(name, node, f"no equivalent ({rejected[node.origin]})")
    kind = _kind(section, work, recipe)
    work.recipe = str(kind.value)
    section.put("recipe", kind)
    for step in (_model, _adapters, _data, _optimizer, _batches, _schedule, _saves):
        step(section, work)
    for name, node in _moved(section, _PREFERENCES).items():
        if node.value not in ("orpo", "nll"):
            section.put_root(f"{work.recipe}.{name}", node)
    section.apply(_TABLE)
    _others(section)
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
    raise RecipeError("must be a number", node.origin, node)


def _listed(node: Node | None) -> Node:
    """Return a list, or a text with commas, as a list; an empty one for no node."""
    if node is None:
        return Node([], "")
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
        what = f"{name}: no such training; there are {', '.join(_KINDS)}"
        raise RecipeError(what, node.origin, text)
    if text == "ipo":
        section.put_root("dpo.loss", work.made("ipo"))
    if work.program == TRL and recipe is None:
        why = "sft, because TRL's files do not state it; for others, add --recipe dpo, kto or reward_model"
        section.note("recipe", work.made(""), why)
    return replace(node, value=_KINDS[text])


def _model(section: Section, work: Conversion) -> None:
    """Translate the precision, and the permission to run code of a model, which also needs a flag here."""
    trusted = section.flag("trust_remote_code")
    if trusted is not None:
        section.put_root("model.trust_remote_code", trusted)
        section.note("trust_remote_code", trusted, "also needs --trust trust_remote_code")
    bf16, fp16 = section.take("bf16"), section.flag("fp16")
    if fp16 is not None:
        section.degraded("fp16", fp16, "float16 needs a loss scaler: bfloat16 is used")
        bf16 = fp16
    if bf16 is not None and bf16.value == "full":
        section.degraded("bf16", bf16, "weights stay in float32, unless model.dtype is bfloat16")
    if bf16 is not None and bf16.value != "auto":
        ours = replace(bf16, value="bfloat16" if is_enabled(bf16) else "none")
        section.put_root("distributed.mixed_precision", ours)


def _adapters(section: Section, work: Conversion) -> None:
    """Translate LoRA and QLoRA. LLaMA-Factory trains adapters by default."""
    name, kind = _first(section, "adapter", "finetuning_type", "use_peft")
    if kind is None:
        kind = work.of_program("lora" if work.program == FACTORY else "full")
    method = str(kind.value).lower()
    bits = section.take("quantization_bit")
    of_8_bits = section.flag("load_in_8bit") or (bits if bits and bits.value == "8" else None)
    quantized = of_8_bits or section.flag("load_in_4bit") or bits
    if quantized is None and method == "qlora":
        quantized = kind
    of_4_bits = section.take("bnb_4bit_quant_type") or work.made("nf4")
    if method in ("lora", "qlora", "true"):
        section.put_root("peft.method", replace(kind, value="lora"))
        _layers(section, work)
        if quantized is not None:
            word = "int8" if of_8_bits else of_4_bits.value
            section.put_root("peft.quantize_base", replace(quantized, value=word))
    else:
        if method not in ("full", "false"):
            section.degraded(name, kind, "no equivalent: all weights are trained")
        for other in section.names():
            if other.startswith(("lora_", "peft_", "use_dora", "use_rslora", "additional_target")):
                section.drop(other)


def _layers(section: Section, work: Conversion) -> None:
    """Translate the layers that have adapters. The default of peft is the queries and values of most models."""
    linear = section.flag("lora_target_linear")
    _, target = _first(section, "lora_target_modules", "lora_target")
    default = "q_proj, v_proj"
    if work.program == FACTORY:
        default = "all"
        if section.peek("lora_alpha") is None:
            alpha = 2 * _number(section.peek("lora_rank") or work.made("8"))
            section.put_root("peft.alpha", work.of_program(str(alpha)))
    target = linear or target or work.of_program(default)
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
    build, *names = {
        AXOLOTL: (_of_axolotl, "datasets", "test_datasets"),
        FACTORY: (_of_factory, "dataset", "eval_dataset"),
        TRL: (_of_trl, "dataset_train_split", "dataset_test_split"),
    }[work.program]
    sets, tests = (list(build(section, work, name)) for name in names)
    _moved(section, _OF_ALL_SETS)
    name, share = _first(section, "val_set_size", "val_size")
    part = 0 if share is None else _number(share)
    if share is not None and part:
        cut = f"{round(100 * (1 - part))}%" if part < 1 else f"-{part}"
        for one in sets:
            split_name = one.get("split", work.made("train")).value
            tests.append({**one, "split": replace(share, value=f"{split_name}[{cut}:]")})
            one["split"] = replace(share, value=f"{split_name}[:{cut}]")
        section.note(name, share, "the last rows, instead of random ones")
    for key, each in (("dataset", sets), ("validation_dataset", tests)):
        if len(each) > 1:
            section.put_root(f"{key}._target_", work.made("automodel_ckpt.data.mixture.mixture"))
        for number, one in enumerate(each):
            limits = {"seq_length": length, "truncation": work.default("dataset.truncation")}
            node = Node({**one, **limits}, work.source.origin)
            section.put_root(key if len(each) == 1 else f"{key}.sources.set{number}", node)
    name, packing = _first(section, "sample_packing", "neat_packing", "packing")
    if packing is not None and is_true(packing):
        section.put_root("packed_sequence.size", replace(length, origin=packing.origin))
        section.note(name, packing, "the samples of a pack do not see each other")


def _set(work: Conversion, builder: str, given: dict[str, Node], **made: str) -> dict[str, Node]:
    """Return the section of a data set. Texts of axolotl and LLaMA-Factory become messages."""
    if work.program != TRL and builder not in ("chat.messages", "text.text"):
        made = {"as_chat": "true", **made}
    target = {"_target_": work.made(f"automodel_ckpt.data.{builder}")}
    return target | {name: work.made(text) for name, text in made.items()} | given


def _of_axolotl(section: Section, work: Conversion, name: str) -> Iterator[dict[str, Node]]:
    """Translate the entries of the key *name*."""
    entries = section.peek(name)
    if entries is not None and not isinstance(entries.value, list):
        raise RecipeError(f"{name} must be a list of data sets", entries.origin, entries)
    for number, _ in enumerate(entries.children() if entries is not None else ()):
        entry = section.inner(f"{name}.{number}")
        given = _moved(entry, "path data_files:path name split revision")
        kind = entry.take("type") or work.made("chat_template")
        word = re.split("[:.]", str(kind))[0]
        builder = _BUILDERS[work.recipe]
        if work.recipe != "llm_finetune":
            text = "the tokenizer's chat template is used; look at --show-samples"
            entry.note("type", kind, text)
        elif word not in _TYPES:
            text = (
                "no equivalent: use text.prompt_completion with prompt_field and completion_field"
            )
            entry.degraded("type", kind, text)
        else:
            builder = _TYPES[word]
            given |= _moved(entry, "field" if word == "completion" else "")
        made = _ALPACA if builder == "text.prompt_completion" else {}
        names = " ".join(f"field_{pair}" for pair in _FIELDS[builder].split())
        yield _set(work, builder, given | _moved(entry, names), **made)
        entry.apply(_ENTRY)
        for rest, node in _moved(entry, " ".join(entry.names())).items():
            if str(node) in _SAME:
                entry.no_effect(rest, node)
            else:
                entry.degraded(rest, node, "no equivalent; look at --show-samples")
    section.take(name)


def _of_factory(section: Section, work: Conversion, name: str) -> Iterator[dict[str, Node]]:
    """Translate the names of data sets, which a file dataset_info.json describes."""
    folder = section.text("dataset_dir") or "data"
    described = read_file(Path(folder, "dataset_info.json"), []) or Node({}, "")
    most = _moved(section, "max_samples", keep=True)
    for _, each in _listed(section.take(name)).children():
        entry = dict(described.children()).get(str(each.value))
        if entry is None:
            text = f"not in {folder}/dataset_info.json: correct path and fields"
            section.degraded(name, each, text)
            entry = Node({"file_name": Node(f"{each.value}.json", "")}, "")
        builder, made = _described(work, entry, folder)
        yield _set(work, builder, most, **made)


def _described(work: Conversion, entry: Node, folder: str) -> tuple[str, dict[str, str]]:
    """Return our builder and its arguments for an entry of dataset_info.json."""
    found = {key: str(node.value) for key, node in entry.walk()}
    builder = _BUILDERS[work.recipe]
    made = {"path": found.get("hf_hub_url") or f"{folder}/{found.get('file_name')}"}
    made |= {ours: found[name] for name, ours in _OF_HUB.items() if name in found}
    columns = {key[8:]: name for key, name in found.items() if key.startswith("columns.")}
    columns = columns or {"prompt": "instruction", "query": "input", "response": "output"}
    if found.get("formatting") == "sharegpt":
        columns = {"messages": "conversations", **columns}
    elif work.recipe != "pretrain":
        builder = "text.prompt_completion" if work.recipe == "llm_finetune" else builder
        prompt = f"{{{{ {columns.pop('prompt')} }}}}"
        if "query" in columns:
            query = columns["query"]
            prompt += f"{{% if {query} %}}\n{{{{ {query} }}}}{{% endif %}}"
        made["prompt_field"] = prompt
    for pair in _FIELDS[builder].split():
        name, _, ours = pair.partition(":")
        if name in columns:
            made[ours] = columns[name]
    return builder, made


def _of_trl(section: Section, work: Conversion, name: str) -> Iterator[dict[str, Node]]:
    """Translate the arguments of TRL's scripts. *name* is the key of the split."""
    text = _moved(section, "dataset_text_field:field", keep=True)
    given = _moved(section, "dataset_name:path dataset_config:name", keep=True)
    builder = "text.text" if text and work.recipe == "llm_finetune" else _BUILDERS[work.recipe]
    split = section.take(name)
    if name == "dataset_test_split":
        if section.text("eval_strategy") in ("", "no"):
            return
        split = split or work.made("test")
    else:
        given |= _moved(section, "dataset_streaming:streaming")
        text_here = f"read by data.{builder}; other builders read text, or prompts with completions"
        section.note("dataset_name", given.get("path") or work.made(""), text_here)
        only = section.peek("assistant_only_loss") or section.peek("completion_only_loss")
        if builder == "chat.messages" and only is None:
            put(work.source, "assistant_only_loss", work.made("false"))
    if split is not None:
        given["split"] = split
    if "path" in given:
        yield _set(work, builder, given | (text if builder == "text.text" else {}))


def _optimizer(section: Section, work: Conversion) -> None:
    name, node = _first(section, "optimizer", "optim")
    if node is not None and node.value in _8BIT:
        ours = replace(node, value="automodel_ckpt.optim.adam8bit.AdamW8bit")
        section.put_root("optimizer._target_", ours)
    elif node is not None and node.value not in _ADAMW:
        section.degraded(name, node, "AdamW is used; optimizer._target_ takes other classes")
    if work.program == TRL and section.peek("learning_rate") is None:
        rate = {"llm_finetune": "2e-5", "reward_model": "1e-4"}.get(work.recipe, "1e-6")
        section.put_root("optimizer.lr", work.of_program(rate))


def _batches(section: Section, work: Conversion) -> None:
    """Translate batch sizes and the length of training."""
    _, local = _first(section, "micro_batch_size", "per_device_train_batch_size")
    local = local or work.default("step_scheduler.local_batch_size")
    name = "gradient_accumulation_steps"
    accumulated = section.take(name) or work.made("1")
    samples = _number(local) * _number(accumulated) * work.num_ranks
    section.put_root("step_scheduler.global_batch_size", work.made(str(samples)))
    section.put_root("step_scheduler.local_batch_size", local)
    text = f"global_batch_size is {local} x {accumulated} accumulated x {work.num_ranks} ranks"
    section.note(name, accumulated, f"{text}; --nproc-per-node N converts for N ranks")
    steps = section.take("max_steps")
    name, epochs = _first(section, "num_epochs", "num_train_epochs")
    if steps is not None and _number(steps) > 0:
        section.put_root("step_scheduler.max_steps", steps)
    elif epochs is not None and _number(epochs) % 1:
        section.degraded(name, epochs, "set step_scheduler.max_steps")
    else:
        epochs = epochs or work.default("step_scheduler.num_epochs")
        whole = str(epochs.value).removesuffix(".0")
        section.put_root("step_scheduler.num_epochs", replace(epochs, value=whole))


def _schedule(section: Section, work: Conversion) -> None:
    """Translate the warmup. A ratio is used if there is no number of steps."""
    steps, ratio = section.take("warmup_steps"), section.take("warmup_ratio")
    if steps is not None and (_number(steps) or ratio is None):
        section.put_root("lr_scheduler.warmup_steps", steps)
    elif ratio is not None or work.program == AXOLOTL:
        section.put_root("lr_scheduler.warmup_ratio", ratio or work.of_program("0.03"))


def _saves(section: Section, work: Conversion) -> None:
    """Translate when to save and to validate. Each end of an epoch is saved, and each checkpoint validated, anyway."""
    for word, name in (("save", "ckpt_every_steps"), ("eval", "val_every_steps")):
        key = f"step_scheduler.{name}"
        steps = section.take(f"{word}_steps")
        if steps is None and key in _DEFAULTS[work.program]:
            steps = work.default(key)
        if steps is not None and section.text(f"{word}_strategy") in ("", "steps"):
            section.put_root(key, steps)


def _others(section: Section) -> None:
    """Rename the other keys, or report them."""
    for name, node in _moved(section, " ".join(section.names())).items():
        known = OTHER_NAMES.get(name)
        if known is None:
            section.degraded(name, node, "no equivalent")
            continue
        word = known.values.get(str(node.value).lower(), "" if known.values else node.value)
        is_free = len(known.keys) == 1 and section.ours(known.keys[0]) is None
        if is_free and not known.note and word:
            section.put_root(known.keys[0], replace(node, value=word))
        elif is_enabled(node) and node.value != "auto":
            section.degraded(name, node, known.hint(str(node)))
        else:
            section.no_effect(name, node)
