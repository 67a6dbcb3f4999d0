"""Steps, epochs and metrics are parsed from the names of checkpoints, and rank them."""

import pytest

from automodel_ckpt.convert.imports.file_names import NameMetadata, parse_name, rank


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "megatron_gpt--val_loss=0.432-step=1000-consumed_samples=32000.0.ckpt",
            NameMetadata(1000, None, 32000, {"val_loss": 0.432}),
        ),
        (
            "megatron_gpt--val_loss=0.432-step=1000-consumed_samples=32000.0-last.ckpt",
            NameMetadata(1000, None, 32000, {"val_loss": 0.432}, is_last=True),
        ),
        ("epoch=3-step=100.ckpt", NameMetadata(100, 3)),
        ("step=7-val/acc=0.5.ckpt", NameMetadata(7, None, None, {"val/acc": 0.5})),
        ("last.ckpt", NameMetadata(is_last=True)),
        ("checkpoint_step_10000_loss_2.3456.pt", NameMetadata(10000, None, None, {"loss": 2.3456})),
        ("model-epoch-3-val_loss-0.5.pth", NameMetadata(None, 3, None, {"val_loss": 0.5})),
        ("checkpoint-500", NameMetadata(500)),
        ("global_step1000", NameMetadata(1000)),
        ("llama_3_8b.pt", NameMetadata()),
        ("model-00001-of-00002.safetensors", NameMetadata()),
        ("lastname.ckpt", NameMetadata()),
        ("step=-1.ckpt", NameMetadata()),
        ("step=123456789012345678901.ckpt", NameMetadata()),
    ],
)
def test_a_name_states_counters_and_metrics(name: str, expected: NameMetadata) -> None:
    assert parse_name(name) == expected


@pytest.mark.parametrize(
    ("metric", "expected"), [("val_loss", ["b", "a", "c"]), ("accuracy", ["a", "b", "c"])]
)
def test_checkpoints_are_ranked_by_their_metric(metric: str, expected: list[str]) -> None:
    values = {"a": 0.5, "b": 0.25, "c": float("nan")}
    metadata = {name: NameMetadata(metrics={metric: value}) for name, value in values.items()}
    metadata["d"] = NameMetadata(step=1)
    ranking = rank(metadata)
    assert ranking is not None
    assert (ranking.metric, list(ranking.names)) == (metric, expected)
