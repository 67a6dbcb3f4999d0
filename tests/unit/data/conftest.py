"""What the tests of data share."""

from typing import Any

import pytest

from automodel_ckpt.examples.data.python_docs import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A small one, which the session's cache keeps once it is trained."""
    return train_tokenizer(400)
