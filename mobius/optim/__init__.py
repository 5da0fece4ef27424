"""AdamW over flat stage states, when each stage is updated, the learning rate and fp16's loss scale."""
