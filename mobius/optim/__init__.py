"""AdamW over flat stage states, when it runs, its learning rate and the loss scale of fp16."""
