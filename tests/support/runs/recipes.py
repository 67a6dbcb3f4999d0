"""Text of recipes for tests that read recipes and train nothing."""

SMALLEST = """\
model:
  from_pretrained: some/model
dataset:
  _target_: automodel_ckpt.data.text.text
  path: data.txt
"""
"""A recipe without an optional key."""
