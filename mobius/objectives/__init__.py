"""Objectives of a run: losses of rows, their gradients, and numbers by name."""
