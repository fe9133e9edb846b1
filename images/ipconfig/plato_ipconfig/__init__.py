"""Hop 0: which gateways to try, best first."""
