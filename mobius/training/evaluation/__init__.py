"""Judges a model: evaluation through the pipeline, and answers generated and scored."""
