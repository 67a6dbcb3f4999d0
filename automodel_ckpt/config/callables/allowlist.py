"""Callables that a recipe may name in ``_target_`` without trust, and the arguments that it may give them.

A recipe file is data that may come from anywhere. Libraries such as transformers and datasets have functions that
import a module, unpickle a file or delete a path by its name, so allowing a package would allow any command. This
module lists exact callables instead, by the *purpose* of the section that names them. To let recipes name one more
callable, add it to a group below, or add a group to ``ALLOWED``; then run ``make hostile``, which calls everything on
the list with arguments that try to run, write and delete things.

Three facts make a callable fit for the list:

* it builds one object and neither imports, unpickles, writes nor deletes anything that its arguments name;
* it never calls an argument. Every argument is plain data (numbers, text, lists, mappings) or the object of a nested
  ``_target_`` that ``NESTED`` allows for this parameter;
* where it accepts any keyword, ``arguments`` lists the keywords that keep this true. Numbers are always accepted: a
  number names no code and no file.

Only the schema and the standard library are imported here; the libraries are imported when an object is compared with
its entry.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from automodel_ckpt.config.keys.data import PROCESSOR_SETTINGS
from automodel_ckpt.config.registry import own_classes


@dataclass(frozen=True)
class Exact:
    """One callable, by its public name. ``arguments`` are the allowed keywords; None: the keywords of its signature."""

    name: str
    arguments: frozenset[str] | None = None

    @property
    def shown(self) -> str:
        """How messages and help name the entry."""
        return self.name

    def names(self, name: str) -> bool:
        """Whether *name* is this entry's name."""
        return name == self.name

    def is_entry(self, name: str, found: Any) -> bool:
        """Whether the object *found* under *name* belongs to the package of this entry."""
        # The public name is re-exported from a module inside the package, so only the root is
        # compared.
        return _is_within(getattr(found, "__module__", None), self.name.partition(".")[0])


@dataclass(frozen=True)
class ClassesOf:
    """The classes that *package* exports, are subclasses of *base* and defined in the package *defined_in*.

    The public name is ``package.Class``, or ``package.Class.method``; *pattern* restricts the class's name.
    """

    package: str
    base: str
    defined_in: str
    method: str = ""
    pattern: str = r"[A-Z]\w*"
    arguments: frozenset[str] | None = None

    @property
    def shown(self) -> str:
        """How messages and help name the entry."""
        prefix = self.pattern.partition("\\")[0] if self.pattern.startswith("Auto") else ""
        suffix = (
            f".{self.method}"
            if self.method
            else f" (each {self.base.rpartition('.')[2].strip('_')})"
        )
        return f"{self.package}.{prefix}*{suffix}"

    def names(self, name: str) -> bool:
        """Whether *name* matches the pattern of this entry's names."""
        method = re.escape(f".{self.method}") if self.method else ""
        # fullmatch: with a match of the beginning, attributes of an allowed class would be allowed
        # too.
        return (
            re.fullmatch(f"{re.escape(self.package)}\\.({self.pattern}){method}", name) is not None
        )

    def is_entry(self, name: str, found: Any) -> bool:
        """Whether the object *found* under *name* is such a class, or that method of one."""
        class_name = name.removeprefix(f"{self.package}.").partition(".")[0]
        owner = getattr(importlib.import_module(self.package), class_name, None)
        if not isinstance(owner, type) or not issubclass(owner, _object_at(self.base)):
            return False
        # The method is checked too, because it may be inherited from a class of another package.
        return all(
            _is_within(getattr(part, "__module__", None), self.defined_in)
            for part in (owner, found)
        )


Entry = Exact | ClassesOf


def _object_at(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _is_within(module: Any, package: str) -> bool:
    return isinstance(module, str) and (module == package or module.startswith(f"{package}."))


CUSTOM = "custom"
"""Purpose of the sections that a custom recipe declares: any entry of the list."""

PURPOSES = {
    "model": "model",
    "tokenizer": "tokenizer",
    "processor": "processor",
    "dataset": "dataset",
    "validation_dataset": "dataset",
    "validation_datasets": "dataset",
    "optimizer": "optimizer",
    "optimizer.groups": "optimizer",
    "lr_scheduler": "lr_scheduler",
    "loss_fn": "loss_fn",
    "dataloader.collate_fn": "collate_fn",
    "distributed.tp_plan": "tp_plan",
    "distill.teacher": "teacher",
}
"""Key of a section that accepts ``_target_``, of a list or mapping of such sections -> its purpose in ``ALLOWED``."""

MAPPINGS = frozenset({"validation_datasets"})
"""The keys in ``PURPOSES`` of mappings from names to sections."""

NESTED = {
    "tokenizer": "tokenizer",
    "processor": "processor",
    "config": "config",
    "quantization_config": "quantization",
    "peft_config": "peft_config",
    "sources": "dataset",
}
"""Parameter of a listed callable -> purpose of the nested ``_target_`` that it accepts, or of those in a mapping.
Other parameters accept none."""


def _keywords(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _exact(prefix: str, names: str) -> tuple[Exact, ...]:
    """The entries of the callables with these *names* after the *prefix*."""
    return tuple(Exact(f"{prefix}{name}") for name in names.split())


# Excluded on purpose: cache_dir and force_download (write and delete at any path of the recipe), storage_options,
# download_config, data_files by chained URLs, features and other objects, weights_only, use_kernels, gguf_file,
# adapter_kwargs, custom_generate, code_revision, quantization_config as plain data.
_LOADING = _keywords(
    # trust_remote_code is listed because false is harmless. prepare.py rejects true without trust.
    "pretrained_model_name_or_path revision subfolder token local_files_only trust_remote_code"
)
_TEXT_LOADING = _LOADING | _keywords(
    "use_fast padding_side truncation_side model_max_length bos_token eos_token pad_token unk_token add_bos_token "
    "add_eos_token add_prefix_space clean_up_tokenization_spaces legacy"
)
_MODEL_SETTINGS = _keywords("config dtype torch_dtype attn_implementation trust_remote_code")
_DATA_READING = _keywords(
    "path name data_dir data_files split revision token streaming num_proc keep_in_memory verification_mode sep "
    "delimiter names column_names header field columns encoding encoding_errors quotechar sample_by skiprows "
    "keep_linebreaks drop_labels drop_metadata"
)

# Builders of this package: they read local data files or data sets of the Hub as data.
_OWN_DATASETS = _exact(
    "automodel_ckpt.data.",
    """
        text.text text.prompt_completion text_pairs.text_pairs retrieval.retrieval seq2seq.source_target
        chat.messages function_calls.xlam preference.pairs kto.judged_completions kto.split_pairs mixture.mixture
        token_files.megatron token_files.nanogpt vlm.conversations vlm.image_answers vlm.transcripts squad.squad
        hellaswag.hellaswag classification.texts
        """,
)
# Data of our examples: text of the Python installation, scans of scikit-learn, random images.
_EXAMPLE_DATASETS = _exact(
    "automodel_ckpt.examples.data.",
    """
        mock.random_tokens mock_images.mock_images library_topics.library_topics python_docs.language_modeling
        python_docs.docstring_pairs python_docs.preferences python_docs.judged_docstrings python_docs.documents
        python_docs.description_pairs python_docs.summaries digits.scans
        """,
)
# Tables read by `datasets`, which has run no script of a data set since version 4; see plugins.py.
_HUB_DATASETS = (
    Exact("datasets.load_dataset", _DATA_READING),
    Exact("datasets.load_from_disk", _keywords("dataset_path keep_in_memory")),
)
# Optimizers: they keep parameters and numbers.
_OPTIMIZERS = (
    ClassesOf("torch.optim", "torch.optim.Optimizer", "torch.optim"),
    Exact("transformers.Adafactor"),
    Exact("automodel_ckpt.optim.adam8bit.AdamW8bit"),
    Exact("automodel_ckpt.optim.muon.Muon"),
)
# Schedules of learning rates: they keep numbers.
_SCHEDULES = (
    ClassesOf(
        "torch.optim.lr_scheduler",
        "torch.optim.lr_scheduler.LRScheduler",
        "torch.optim.lr_scheduler",
        # These two call functions, which no recipe can have without trust.
        pattern=r"(?!LambdaLR|MultiplicativeLR)[A-Z]\w*",
    ),
)
# Losses: modules of numbers.
_LOSSES = (ClassesOf("torch.nn", "torch.nn.modules.loss._Loss", "torch.nn.modules.loss"),)
# Layers: modules that allocate parameters by their sizes.
_LAYERS = (ClassesOf("torch.nn", "torch.nn.Module", "torch.nn.modules"),)
# Collators: they pad lists of numbers.
_COLLATORS = (
    *_exact(
        "automodel_ckpt.data.",
        "collate.PadCollator image_collate.ImageTextCollator text_pairs.PairCollator seq2seq.SourceTargetCollator",
    ),
    *_exact(
        "transformers.",
        "DataCollatorForLanguageModeling DataCollatorForSeq2Seq DataCollatorForTokenClassification "
        "DataCollatorWithFlattening DataCollatorWithPadding DefaultDataCollator",
    ),
)
# Tokenizers read from a directory or the Hub, never with code from there; the one of our examples.
_TOKENIZERS = (
    Exact("transformers.AutoTokenizer.from_pretrained", _TEXT_LOADING),
    Exact("automodel_ckpt.examples.data.python_docs.train_tokenizer"),
)
# Processors read from a directory or the Hub, never with code from there; our examples' too.
_PROCESSORS = (
    Exact(
        "transformers.AutoProcessor.from_pretrained",
        _TEXT_LOADING | PROCESSOR_SETTINGS,
    ),
    Exact("automodel_ckpt.examples.data.digits.processor"),
    Exact("automodel_ckpt.examples.data.tones.processor"),
)
# Models of transformers by their Auto class, never with code from a model's repository.
_MODELS = (
    ClassesOf(
        "transformers",
        "transformers.models.auto.auto_factory._BaseAutoModelClass",
        "transformers.models.auto",
        method="from_pretrained",
        pattern=r"AutoModel\w*",
        arguments=_LOADING
        | _MODEL_SETTINGS
        | _keywords("quantization_config use_safetensors variant"),
    ),
    ClassesOf(
        "transformers",
        "transformers.models.auto.auto_factory._BaseAutoModelClass",
        "transformers.models.auto",
        method="from_config",
        pattern=r"AutoModel\w*",
        arguments=_MODEL_SETTINGS,
    ),
)
# Teachers of our examples: counts of tokens in their text, means of their images.
_TEACHERS = (
    Exact("automodel_ckpt.examples.data.pair_counts.pair_counts"),
    Exact("automodel_ckpt.examples.data.digit_means.digit_means"),
)
# Configurations of transformers models: plain settings.
_CONFIGS = (
    Exact("transformers.AutoConfig.from_pretrained", _LOADING),
    ClassesOf(
        "transformers",
        "transformers.PreTrainedConfig",
        "transformers.models",
        pattern=r"[A-Z]\w*Config",
    ),
)
# The settings of bitsandbytes: plain settings.
_QUANTIZATION = (Exact("transformers.BitsAndBytesConfig"),)
# Configurations of adapters: plain settings.
_PEFT_CONFIGS = (ClassesOf("peft", "peft.PeftConfig", "peft", pattern=r"[A-Z]\w*Config"),)

ALLOWED: dict[str, tuple[Entry, ...]] = {
    "model": _MODELS,
    "teacher": _MODELS + _TEACHERS,
    "tokenizer": _TOKENIZERS,
    "processor": _PROCESSORS,
    "dataset": _OWN_DATASETS + _EXAMPLE_DATASETS + _HUB_DATASETS,
    "optimizer": _OPTIMIZERS,
    "lr_scheduler": _SCHEDULES,
    "loss_fn": _LOSSES,
    "collate_fn": _COLLATORS,
    "tp_plan": (),  # a plan names modules of one model: it is the user's code
    "config": _CONFIGS,
    "quantization": _QUANTIZATION,
    "peft_config": _PEFT_CONFIGS,
}
"""Purpose -> the callables that a section with this purpose may name without trust."""

ALLOWED[CUSTOM] = (*(entry for entries in ALLOWED.values() for entry in entries), *_LAYERS)
ALLOWED["recipe"] = tuple(Exact(name) for name in own_classes())


def purpose_of(key: str, sections: Container[str]) -> str:
    """Return the purpose of the section at a dotted *key*; empty if no code is allowed there.

    *sections* are the top-level sections of ``RecipeConfig``. A custom recipe declares further ones.
    """
    parent = key.rpartition(".")[0]
    if parent in MAPPINGS:
        return PURPOSES[parent]
    # optimizer.groups.0 is an item of the list optimizer.groups and has its purpose.
    without_numbers = ".".join(part for part in key.split(".") if not part.isdecimal())
    if without_numbers in PURPOSES:
        return PURPOSES[without_numbers]
    return "" if key.partition(".")[0] in sections else CUSTOM


def entries_for(purpose: str) -> tuple[Entry, ...]:
    """Return the entries for a purpose; none for an unknown purpose."""
    return ALLOWED.get(purpose, ())


def may_name(purpose: str, name: str) -> bool:
    """Whether *name* can be on the list for *purpose*. Compares names only, and imports nothing."""
    return any(entry.names(name) for entry in entries_for(purpose))


def entry_of(purpose: str, name: str, found: Any) -> Entry | None:
    """Return the entry that allows the object *found* under *name* for *purpose*.

    Returns None when it is not on the list.
    """
    for entry in entries_for(purpose):
        if entry.names(name) and entry.is_entry(name, found):
            return entry
    return None


def defaults(name: str) -> dict[str, Any]:
    """Return the arguments that a callable gets unless the recipe sets them.

    Without ``trust_remote_code``, an Auto class of transformers asks on the terminal whether to run remote code.
    """
    asks = any(
        entry.names(name) and "trust_remote_code" in (entry.arguments or ())
        for entry in entries_for(CUSTOM)
    )
    return {"trust_remote_code": False} if asks else {}


def suggestion(purpose: str, name: str) -> str:
    """List what *purpose* allows, with the names closest to *name* first; empty if it allows nothing."""
    listed = list(dict.fromkeys(entry.shown for entry in entries_for(purpose)))
    near = difflib.get_close_matches(name, listed, 4, 0.0) if "." in name else listed[:4]
    return ", ".join(near) + (", ..." if len(listed) > 4 else "")
