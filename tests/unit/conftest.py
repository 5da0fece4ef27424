"""Whole runs in this process: one rank on the CPU, with a tiny checkpoint and its dataset."""

from harness.small_run import eight, run, saved_inputs, workplace

__all__ = ["eight", "run", "saved_inputs", "workplace"]
