"""The topology: one record per cluster, versioned by epoch, that tells every process who owns what. Pure."""
