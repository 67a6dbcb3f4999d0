"""A fine-tuning trainer for Hugging Face models with checkpoints that can be trusted.

Importing this package is cheap: it imports neither torch nor transformers.
"""

from __future__ import annotations

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
