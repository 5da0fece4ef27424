"""Text parts of multimodal models: their configurations and weight names."""
