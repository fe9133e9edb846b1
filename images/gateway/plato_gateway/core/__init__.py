"""The pure core of gateway."""
