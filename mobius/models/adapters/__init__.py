"""LoRA adapters of frozen layers: their placement, initial values, files, and base model."""
