"""Scripts and manifests for clusters."""
