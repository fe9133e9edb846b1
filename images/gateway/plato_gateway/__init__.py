"""Hops 1 and 6: holds sockets, nothing else."""
