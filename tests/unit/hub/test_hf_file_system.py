"""Why ``hf://`` is no store for checkpoints: what the file system of huggingface_hub does, and our error."""

from __future__ import annotations

import inspect

import pytest
from huggingface_hub import HfFileSystem, hf_file_system

from automodel_ckpt.checkpoint.store.store import Store
from automodel_ckpt.errors import RecipeError
from tests.support.servers.hub_server import TOKEN, USER, HubServer

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def test_each_object_of_a_repository_is_a_commit(hub: HubServer) -> None:
    repository = hub.add("org/tiny", {})
    files = HfFileSystem(endpoint=hub.endpoint, token=TOKEN, use_listings_cache=False)
    for name in ("MANIFEST.json", "LATEST"):
        files.pipe_file(f"org/tiny/run/{name}", b"content")
    files.rm_file("org/tiny/run/LATEST")
    assert len(repository.commits) == 1 + 3
    assert list(repository.files()) == ["run/MANIFEST.json"]


@pytest.mark.skipif(
    "bucket" not in inspect.getsource(hf_file_system), reason="this file system has no buckets"
)
def test_an_object_that_another_process_wrote_is_not_found_in_a_bucket(hub: HubServer) -> None:
    bucket = hub.buckets[f"{USER}/bucket"] = {"run/LATEST": 7}
    files = HfFileSystem(endpoint=hub.endpoint, token=TOKEN, use_listings_cache=False)
    assert files.info("buckets/org/bucket/run/LATEST")["size"] == 7
    bucket["run/LOWEST_VAL"] = 7
    with pytest.raises(FileNotFoundError):
        files.info("buckets/org/bucket/run/LOWEST_VAL")


@pytest.mark.parametrize("url", ["hf://org/tiny/run", "hf://buckets/org/bucket/run"])
def test_the_error_names_what_to_use_instead(url: str) -> None:
    with pytest.raises(RecipeError, match="not a store of checkpoints") as caught:
        Store(url, where="checkpoint.remote")
    message = str(caught.value)
    assert "checkpoint.remote.url" in message and "section hub" in message
