"""The section ``pretrain`` of the recipe ``pretrain``."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_ckpt.config.tree.rules import AT_LEAST_1, POSITIVE, setting


@dataclass
class PretrainConfig:
    """Pretraining: how rows divide documents, the z-loss, and learning rates by width. Rows: packed_sequence."""

    split_documents: bool = False
    """Let a document continue in the next row, so that all rows are full; false: no document is in two rows."""
    attend_across_documents: bool = False
    """Let attention and labels cross from a document to the next one in its row; false: each sees only itself."""
    z_loss: float | None = setting(None, POSITIVE)
    """Coefficient of the z-loss, the square of logsumexp(logits) of each label; usual: 1e-4; null: none. It is a metric
    beside the loss in training.jsonl."""
    base_width: int | None = setting(None, AT_LEAST_1)
    """Hidden size for which optimizer.lr and the config's initializer_range are meant. Other widths scale the learning
    rates and initial values of hidden matrices and the output layer; null: no scaling."""
