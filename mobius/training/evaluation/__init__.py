"""Evaluation through the pipeline; generation of answers, and their scores."""
