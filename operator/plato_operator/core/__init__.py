"""The planner: a snapshot of what is goes in, the orders of one pass come out. Pure: it reads no clock and calls nothing."""
