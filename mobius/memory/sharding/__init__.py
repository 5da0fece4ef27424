"""Stages shared by replicas: gradients are reduced and weights gathered, concurrently with computation."""
