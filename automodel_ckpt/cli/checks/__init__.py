"""``ckpt-train --dry-run`` and ``--selftest-resume``: check a recipe before training with it."""
