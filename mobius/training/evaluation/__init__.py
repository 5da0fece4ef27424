"""Evaluation through the pipeline, and generation and scores of answers."""
