"""A run's state to the disk and back, the folder of the run, and the Hugging Face export of its result."""
