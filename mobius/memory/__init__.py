"""Storage of training state: flat stage layouts, host memory of streamed stages, GPU slots and resident stages."""
