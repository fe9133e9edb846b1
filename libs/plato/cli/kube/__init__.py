"""`kubectl plato`: a PlatoCluster at a glance, its slots, drains and moves, and a bundle for support."""
