"""Run examples/slurm/train.sbatch on a temporary Slurm: `make slurm`."""
