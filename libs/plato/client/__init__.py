"""The Python client: never loses, doubles or re-orders a message, never needs its user after a disconnect."""
