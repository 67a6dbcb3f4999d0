"""The label of a position without a label, as in transformers and ``torch.nn.functional.cross_entropy``."""

IGNORE_INDEX = -100
