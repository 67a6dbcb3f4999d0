"""Files of NeMo and Megatron."""
