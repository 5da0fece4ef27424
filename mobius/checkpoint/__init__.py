"""Saving and loading of a run's state, the folder of the run, and the Hugging Face export of its result."""
