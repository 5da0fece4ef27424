"""Training run: setup, training, evaluation, checkpoints and reports."""
