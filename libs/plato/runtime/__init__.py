"""What every process needs around its work: settings, logs, metrics, health, start and stop."""
