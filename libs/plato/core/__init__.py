"""Pure code that services share: codes, ids, frames, checks. No clock, no socket, no library."""
