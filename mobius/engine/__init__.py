"""Execution of a step on one rank: forward and backward of stages, the memory of their state, and its update."""
