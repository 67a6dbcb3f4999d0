"""Converters between the tensor names of Megatron-Core or torchtitan and of Hugging Face models.

A converter is one declarative file (``llama.py``, ...): a list of rules, each of which pairs names and
states which rows of the tensors on one side are which rows of those on the other. Both directions follow from the same
rule, and both describe the result as slices of the original files: no tensor is read here. Imports no torch.
"""
