"""The process that a rank is: its place among the ranks, signals, log, limits of the system, and what it does now."""
