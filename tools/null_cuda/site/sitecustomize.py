"""What Python imports first in a command of tools.null_cuda: the parts that the environment variables select."""

import os
import sys

if os.environ.get("NULL_NO_TRITON"):
    sys.modules["triton"] = None  # type: ignore[assignment]
if os.environ.get("NULL_CUDA_REAL"):
    import null_operators

    null_operators.install_all()
if os.environ.get("NULL_CUDA_PROBES"):
    import null_probes  # noqa: F401
if os.environ.get("NULL_SNAP") or os.environ.get("NULL_PEAK"):
    import null_memory_report  # noqa: F401
