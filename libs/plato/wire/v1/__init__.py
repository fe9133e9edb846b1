"""Version 1. `make proto` generates the stubs; CI compares."""
