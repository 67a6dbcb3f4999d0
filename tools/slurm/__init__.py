"""Run examples/slurm/train.sbatch on a Slurm of its own: `make slurm`."""
