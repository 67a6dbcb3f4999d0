"""Tiny random models of every architecture that is converted to GGUF, with tokenizers as these models have.

The initializer range is 0.3: at transformers' 0.02 greedy output is one token again and again, and proves nothing.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from automodel_ckpt.convert.formats.gguf.pre_tokenizers import (
    BYTES_AND_WORDS,
    PRE_TOKENIZERS,
    SINGLE_DIGITS,
)
from automodel_ckpt.convert.formats.gguf.sentencepiece import SPACE
from tests.support.models.sizes import model_sizes

_UNKNOWN, _BOS, _EOS, _PAD = "<unk>", "<s>", "</s>", "<pad>"
_MARKER = "<|marker|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
)


def byte_level(pre: str, vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer whose way of splitting text is the *pre* of llama.cpp."""
    (known,) = [entry for entry in PRE_TOKENIZERS if entry.name == pre]
    steps: list[Any] = []
    for step in known.steps[:-1]:
        if step == SINGLE_DIGITS:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            steps.append(pre_tokenizers.Split(tokenizers.Regex(step), "isolated"))
    use_regex = known.steps[-1] == BYTES_AND_WORDS
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=known.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_PAD, _BOS, _EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return _finished(tokenizer)


def sentencepiece_like(style: str, vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a BPE tokenizer with byte fallback, as SentencePiece makes it.

    *style* is ``gemma`` (spaces are replaced), ``llama`` (as files of transformers 4: a space is put in front), or
    ``mistral`` (as transformers 5 writes it: Metaspace).
    """
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    special = [_UNKNOWN, _BOS, _EOS, _PAD]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 260, show_progress=False)
    # Words only: merges of characters that are rare would differ between processes.
    trained.train_from_iterator(_texts(), trainer)
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    vocab = {
        token: index
        for index, token in enumerate([*special, *byte_tokens, *(text for text, _ in pieces)])
    }
    merges: list[tuple[str, str]] = []
    for token, _ in pieces:
        for cut in range(1, len(token)):
            if token[:cut] in vocab and token[cut:] in vocab:
                merges.append((token[:cut], token[cut:]))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=_UNKNOWN)
    )
    _set_spaces(tokenizer, style)
    tokenizer.add_special_tokens(special)
    return _finished(tokenizer, unk_token=_UNKNOWN)


def _set_spaces(tokenizer: Any, style: str) -> None:
    replaced = normalizers.Replace(" ", SPACE)
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "gemma":
        tokenizer.normalizer = replaced
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif style == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replaced])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=SPACE, prepend_scheme="first", split=False
        )
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    bos = tokenizer.token_to_id(_BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_BOS} $A", pair=f"{_BOS} $A {_BOS} $B", special_tokens=[(_BOS, bos)]
    )


def _finished(tokenizer: Any, **more: str) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([tokenizers.AddedToken(_MARKER, normalized=False)])
    make: Any = PreTrainedTokenizerFast
    found: PreTrainedTokenizerFast = make(
        tokenizer_object=tokenizer, bos_token=_BOS, eos_token=_EOS, pad_token=_PAD, **more
    )
    found.chat_template = CHAT_TEMPLATE
    return found


def _texts() -> list[str]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return [topics[name] for name in sorted(topics)]


@dataclass(frozen=True)
class TinyModel:
    """A model of the table below: its architecture, tokenizer (``style`` or ``pre``) and settings of its config."""

    name: str
    model_type: str
    tokenizer: str
    dtype: torch.dtype = torch.float32
    config: Mapping[str, Any] = field(default_factory=dict)

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        kind, _, name = self.tokenizer.partition(":")
        return sentencepiece_like(name) if kind == "spm" else byte_level(name)

    def build(self, dtype: torch.dtype | None = None, vocab_size: int = 520) -> Any:
        """Build the model; the same weights in each call, rounded to *dtype*."""
        config = AutoConfig.for_model(
            self.model_type, vocab_size=vocab_size, **{**_SIZES, **self.config}
        )
        torch.manual_seed(3)
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, dtype=self.dtype, attn_implementation="eager")
        # Constant norms and zero biases would hide that they are swapped.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape, dtype=parameter.dtype))
            if self.model_type.startswith("gemma"):
                # Gemma enlarges embeddings: with these, the next token would always be the last one again.
                model.get_input_embeddings().weight.mul_(0.1)
        if dtype is not None and dtype != self.dtype:
            wide = make(config, dtype=dtype, attn_implementation="eager")
            wide.load_state_dict(model.state_dict())
            model = wide
        return model.eval()

    def path_in(self, parent: Path) -> Path:
        return parent / self.name.replace(",", "").replace(" ", "-").lower()

    def save_in(self, parent: Path) -> Path:
        """Write Hugging Face files to :meth:`path_in`."""
        return self.save(self.path_in(parent))

    def save(self, directory: Path) -> Path:
        self.build().save_pretrained(directory)
        self.make_tokenizer().save_pretrained(directory)
        return directory


_SIZES: dict[str, Any] = {
    **model_sizes(hidden=128, inner=160, layers=4, heads=4, kv_heads=2, positions=256),
    "head_dim": 32,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Small caps, which change the result.
_GEMMA = {
    "query_pre_attn_scalar": 64,
    "head_dim": 64,
    "sliding_window": 16,
    "final_logit_softcapping": 0.5,
}
_GEMMA_2 = {**_GEMMA, "attn_logit_softcapping": 2.0}
_GEMMA_3_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MODELS: tuple[TinyModel, ...] = (
    TinyModel("Llama 2", "llama", "spm:llama"),
    TinyModel("Mistral", "mistral", "spm:mistral", config={"sliding_window": None, "head_dim": 48}),
    TinyModel("Mistral, sliding", "mistral", "bpe:tekken", config={"sliding_window": 128}),
    TinyModel("Qwen 2, tied", "qwen2", "bpe:qwen2", config={"tie_word_embeddings": True}),
    TinyModel("Qwen 2", "qwen2", "bpe:qwen2"),
    TinyModel("Qwen 3", "qwen3", "bpe:qwen2", torch.bfloat16, {"head_dim": 64}),
    TinyModel("SmolLM 2", "llama", "bpe:smollm", config={"tie_word_embeddings": True}),
    TinyModel("SmolLM 3", "smollm3", "bpe:llama-bpe"),
    TinyModel("Gemma 2", "gemma2", "spm:gemma", config=_GEMMA_2),
    TinyModel("Gemma 3", "gemma3_text", "spm:gemma", config={**_GEMMA, "num_hidden_layers": 7}),
    TinyModel(
        "Gemma 3, linear",
        "gemma3_text",
        "spm:gemma",
        torch.bfloat16,
        {**_GEMMA, "num_hidden_layers": 7, "rope_parameters": _GEMMA_3_LINEAR},
    ),
)
"""What is exported to GGUF: every architecture, kind of tokenizer and scaling of positions."""


def model_named(name: str) -> TinyModel:
    (model,) = [model for model in MODELS if model.name == name]
    return model
