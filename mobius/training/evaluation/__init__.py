"""Evaluation through the pipeline; generation of answers, and scores of answers."""
