"""The plan of a run: the places of layers, memory, predicted seconds of a step, and measurements of this machine."""
