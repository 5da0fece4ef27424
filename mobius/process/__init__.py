"""The process of a rank: its place among the ranks, signals, log, limits of the system, and current activity."""
