"""A small tokenizer, trained on the documentation that comes with Python."""

from functools import cache
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


@cache
def _trained(vocab_size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    text: str = tokenizer.to_str()
    return text


def small_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; *vocab_size* is at least 259."""
    make: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = make(
        tokenizer_object=Tokenizer.from_str(_trained(vocab_size)), **_SPECIAL
    )
    return made
