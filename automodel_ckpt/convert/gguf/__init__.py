"""The GGUF format of llama.cpp: its header, the architectures and tokenizers that are converted, tensor types.

Used by ``targets/gguf.py``, which writes such files, and by ``sources/gguf_file.py``, which reads them. Pure functions
and tables; only ``header.py`` reads a file. Imports no torch.
"""
