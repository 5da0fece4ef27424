"""Owns what the parts of a step take by themselves, in seconds."""
