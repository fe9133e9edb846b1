"""Twins of the adapters in memory; they pass the same contract suites."""
