"""Owns what several pipelines that share a step change of a plan: bytes of a stage's states, and what travels when."""
