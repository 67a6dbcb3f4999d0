"""Names on disk, in both directions, and the dtypes of files."""

import pytest

from automodel_ckpt.checkpoint.files import layout
from automodel_ckpt.checkpoint.files.layout import CheckpointName

UNIQUE = "0123456789abcdef" * 2


def test_a_checkpoints_name_is_read_back_and_ordered_by_step() -> None:
    name = CheckpointName(step=20, epoch=1)
    assert str(name) == "epoch_1_step_20" and layout.parse_checkpoint_name(str(name)) == name
    assert CheckpointName(9, 5) < CheckpointName(10, 0) < CheckpointName(10, 1)
    for text in (
        "epoch_1_step_",
        "epoch_1_step_2x",
        "xepoch_1_step_2",
        "LATEST",
        "epoch_-1_step_2",
    ):
        assert layout.parse_checkpoint_name(text) is None


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("model/a.safetensors", None),
        ("a", None),
        ("", "not a plain relative path"),
        ("/a", "not a plain relative path"),
        ("a\\b", "a character"),
        ("a/../b", "plain relative"),
        ("a//b", "plain relative"),
        ("a/", "plain relative"),
        ("./a", "plain relative"),
        ("a\0", "a character"),
        ("\ud800", "a character"),
        ("a\udfff", "a character"),
        ("\ue000\ud7ff", None),
    ],
)
def test_paths_in_a_checkpoint_stay_inside_it(path: str, why: str | None) -> None:
    found = layout.unsafe_path(path)
    assert (found is None) if why is None else (found is not None and why in found)
