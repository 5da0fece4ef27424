"""Adapters on the disk: the folder that peft loads, and the model that they are merged into."""
