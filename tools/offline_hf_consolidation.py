"""Export a sharded checkpoint as Hugging Face files; runs from a checkout without installing the package.

    python tools/offline_hf_consolidation.py --input-dir checkpoints/LATEST/model --output-dir exported

The number of processes comes from --nproc or NPROC_PER_NODE: torchrun is not needed.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
if (_ROOT / "automodel_ckpt" / "__init__.py").is_file():
    sys.path.insert(0, str(_ROOT))

from automodel_ckpt.consolidate import main  # noqa: E402 - the path comes first

if __name__ == "__main__":
    sys.exit(main())
