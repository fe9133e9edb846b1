"""Hops 2 and 5: what a connection means."""
