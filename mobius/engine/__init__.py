"""Runs a step on one rank: forward and backward of stages, memory of the training state, and optimizer updates."""
