"""Owns all that a run leaves: the model folder, reports, metrics, traces and their pictures."""
