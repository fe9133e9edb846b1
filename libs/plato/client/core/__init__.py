"""Pure part of the client: frames, answers and clock readings come in; frames, writes and notices go out."""
