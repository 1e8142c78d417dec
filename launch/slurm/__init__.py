"""Batch scripts for Slurm: the controller in the batch step of the first node, one task a rank."""
