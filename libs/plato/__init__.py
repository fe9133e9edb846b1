"""Plato: an instant-messaging platform. ARCHITECTURE.md has the layout and the rules."""

__version__ = "0.1.0"
