"""Packs of conversations with images: the losses and gradients are those of one sample per row, or an error."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from automodel_ckpt.data.image_collate import ImageTextCollator
from automodel_ckpt.data.media.image_conversations import ImageText
from automodel_ckpt.data.media.image_packing import ImagePack, ImageRowLayout, PackCollator
from automodel_ckpt.data.vlm import conversations
from automodel_ckpt.models.attention.by_document import attend_by_document
from automodel_ckpt.models.attention.positions import rotary_positions
from automodel_ckpt.models.attention.row_masks import install_row_masks
from automodel_ckpt.models.inspect.interface import image_token_ids
from automodel_ckpt.training.model.image_rows import RowProbe
from tests.support.models.vision import FAMILIES, TEXT, write_conversations

SAMPLES = (0, 4, 2, 3, 5, 9, 6)
"""Two of them, 4 and 9, are text without an image."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data"), 10)


def tiny(family: str, attention: str = "sdpa") -> tuple[Any, Any, ImageTextCollator]:
    config, processor = FAMILIES[family]()
    text = config.get_text_config()
    text.vocab_size = len(processor.tokenizer)
    text.max_position_embeddings = TEXT["max_position_embeddings"]
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
    # Larger weights than those of an untrained model, so that images and attention matter.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    collate = ImageTextCollator(processor, image_token_ids(config, processor))
    return model, processor, collate


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = dict(batch)
    labels = inputs.pop("labels")
    logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
    )


def losses_and_gradients(
    model: Any, batches: list[dict[str, torch.Tensor]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        total += loss.detach()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return total, gradients


@pytest.mark.parametrize(
    ("family", "one_row", "by_document"),
    [
        ("llava", False, False),
        ("gemma3", False, False),
        ("qwen2_5_vl", True, True),
        *(
            pytest.param(family, family == "qwen2_5_vl", False, marks=pytest.mark.further)
            for family in FAMILIES
            if family not in ("llava", "gemma3")
        ),
    ],
)
def test_packed_samples_have_the_losses_and_gradients_of_single_ones(
    family: str, one_row: bool, by_document: bool, data: Path
) -> None:
    model, processor, collate = tiny(family)
    install_row_masks(model)
    if by_document:
        assert attend_by_document(model, {"use_cache": False})
    dataset = conversations(processor, str(data))
    samples: list[ImageText] = [dataset[number] for number in SAMPLES]
    lengths = [collate.num_tokens(sample) for sample in samples]
    packs = [ImagePack(samples[:3], lengths[:3]), ImagePack(samples[3:], lengths[3:])]
    layout = ImageRowLayout(rotary_positions(model), one_row, multiple=8)
    rows = layout(PackCollator(collate)(packs))
    assert len(rows["labels"]) == (1 if one_row else 2) and "attention_mask" not in rows
    single, single_gradients = losses_and_gradients(model, [collate([s]) for s in samples])
    packed, packed_gradients = losses_and_gradients(model, [rows])
    torch.testing.assert_close(packed, single, rtol=1e-6, atol=0)
    largest = max(float(gradient.abs().max()) for gradient in single_gradients)
    for of_packed, of_single in zip(packed_gradients, single_gradients, strict=True):
        torch.testing.assert_close(of_packed, of_single, rtol=1e-4, atol=1e-5 * largest)


def probe_of(model: Any, collate: ImageTextCollator) -> RowProbe:
    rows = ImageRowLayout(rotary_positions(model), multiple=8)
    probed: Any = SimpleNamespace(
        from_tokens=model,
        options={"use_cache": False},
        compute=nullcontext,
        layout=SimpleNamespace(device=torch.device("cpu")),
    )
    return RowProbe(probed, collate, rows)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llava", "eager"),
        ("gemma3", "sdpa"),
        ("qwen2_5_vl", "sdpa"),
        *(
            pytest.param(family, "sdpa", marks=pytest.mark.further)
            for family in FAMILIES
            if family not in ("gemma3", "qwen2_5_vl")
        ),
    ],
)
def test_the_probe_accepts_models_that_keep_samples_apart(family: str, attention: str) -> None:
    model, _, collate = tiny(family, attention)
    if family.startswith("gemma"):
        assert install_row_masks(model) is not None
    apart = probe_of(model, collate).keeps_samples_apart()
    assert apart, apart.reason


def lets_attention_cross(module: Any, args: Any, inputs: dict[str, Any]) -> Any:
    positions = torch.arange(inputs["input_ids"].shape[1])
    return args, {**inputs, "position_ids": positions.expand_as(inputs["input_ids"])}


def exchanges_images(module: Any, args: Any, inputs: dict[str, Any]) -> Any:
    return args, {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}


def fails(module: Any, args: Any, inputs: dict[str, Any]) -> Any:
    raise ValueError("only one sample per row")


@pytest.mark.parametrize(
    ("defect", "reason"),
    [(lets_attention_cross, ""), (exchanges_images, ""), (fails, "only one sample per row")],
)
def test_the_probe_rejects_models_that_mix_samples_or_their_images(
    defect: Any, reason: str
) -> None:
    model, _, collate = tiny("llava")
    model.register_forward_pre_hook(defect, with_kwargs=True)
    apart = probe_of(model, collate).keeps_samples_apart()
    assert not apart and reason in apart.reason
