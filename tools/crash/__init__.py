"""Campaigns that try to lose a checkpoint: kills, power cuts, failing system calls, flipped bits (docs/guarantees.md).

python -m tools.crash kill --points 2000 --seed 1
"""
