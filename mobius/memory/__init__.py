"""Where bytes live: the flat layout of a stage, host memory of streamed stages, GPU slots and resident stages."""
