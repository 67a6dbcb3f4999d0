"""``ckpt-train --write-launcher``: batch scripts and manifests that run a recipe on a cluster, as text to review."""
