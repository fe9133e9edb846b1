"""The pure core of msg."""
