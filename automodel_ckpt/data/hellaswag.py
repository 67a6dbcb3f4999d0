"""HellaSwag: the right one of four endings of a story."""

from __future__ import annotations

from typing import Literal, Unpack

from transformers import PreTrainedTokenizerBase

from automodel_ckpt.data.collate import RowOptions
from automodel_ckpt.data.rows.rows import Rows
from automodel_ckpt.data.samples.encoder import Encoder
from automodel_ckpt.data.samples.labels import list_of, whole_number
from automodel_ckpt.data.samples.samples import TextDataset, samples_of
from automodel_ckpt.data.samples.tokenized import Samples, Truncation


def hellaswag(
    tokenizer: PreTrainedTokenizerBase,
    path: str | list[str] = "Rowan/hellaswag",
    seq_length: int | None = 512,
    truncation: Literal["error", "right", "skip"] = "error",
    **options: Unpack[RowOptions],
) -> TextDataset:
    """Make a sample of each row: the beginning of the story without labels, and the right ending with labels.

    *path* is a data set of the Hub, or a local file or directory, with the columns ``ctx``, ``endings`` (four texts)
    and ``label`` (the number of the right ending from 0, as text or number). A row without a label, as in the split
    ``test``, is rejected with its location. For *truncation* and *streaming* see
    :func:`~automodel_ckpt.data.text.prompt_completion`.
    """
    encoder = Encoder(tokenizer)

    def encode(rows: Rows) -> Samples:
        (beginnings,) = rows.texts(["ctx"])
        endings, labels = rows.columns(["endings", "label"])
        prompts = [text.strip() for text in beginnings]
        completions = []
        for row, choices in enumerate(endings):
            number = whole_number(labels[row])
            ending = dict(enumerate(list_of(choices) or ())).get(number)  # type: ignore[arg-type]
            if not ending:
                raise rows.unusable(
                    row,
                    "a row has no valid label",
                    f"label {labels[row]!r} of {str(choices)[:80]}",
                    "use the split train or validation (the split test has no labels)",
                )
            completions.append(f" {str(ending).strip()}")
        return encoder.pairs(prompts, completions)

    return samples_of(
        path,
        tokenizer,
        encode,
        Truncation.of(truncation, seq_length),
        key=("hellaswag",),
        **options,
    )
