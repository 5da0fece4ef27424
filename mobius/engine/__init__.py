"""Execution of a step on one rank: forward and backward of stages, where their state is kept, and its update."""
