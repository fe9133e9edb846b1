"""The pure core of state."""
