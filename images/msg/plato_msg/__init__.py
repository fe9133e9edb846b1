"""Hops 3 and 4: order in the conversation, the store of messages, fan-out."""
