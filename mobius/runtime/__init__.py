"""Execution of the schedule on one rank."""
