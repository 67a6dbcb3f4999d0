"""Text of recipes for tests that read recipes and train nothing."""

from __future__ import annotations

SMALLEST = """\
model:
  from_pretrained: some/model
dataset:
  _target_: automodel_ckpt.data.text.text
  path: data.txt
"""
"""A recipe without an optional key."""
