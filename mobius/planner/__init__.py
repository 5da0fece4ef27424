"""The plan of a run: its stages, its memory, the predicted step, and measurements of this machine."""
