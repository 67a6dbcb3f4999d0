"""Check what `ckpt-train --write-launcher` writes for Kubernetes and SkyPilot: `make launchers`."""
