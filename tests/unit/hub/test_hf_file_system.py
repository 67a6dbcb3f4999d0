"""Why ``hf://`` is no store for checkpoints: what the file system of huggingface_hub does, and our error."""

import pytest

from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import RecipeError

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.mark.parametrize("url", ["hf://org/tiny/run", "hf://buckets/org/bucket/run"])
def test_the_error_names_what_to_use_instead(url: str) -> None:
    with pytest.raises(RecipeError, match="not a store of checkpoints") as caught:
        Store(url, where="checkpoint.remote")
    message = str(caught.value)
    assert "checkpoint.remote.url" in message and "section hub" in message
