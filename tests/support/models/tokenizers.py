"""The tokenizer of the example ``automodel_ckpt.examples.data.python_docs``, which recipes of tests name."""

from automodel_ckpt.examples.data.python_docs import train_tokenizer

__all__ = ["train_tokenizer"]
