"""``ckpt-train --dry-run``, ``--show-samples`` and ``--selftest-resume``: check a recipe before training with it."""
