"""The command `plato`."""
