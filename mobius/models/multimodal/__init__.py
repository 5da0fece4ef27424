"""Text parts of models that also take images or sound: their configuration, and their weights' names."""
