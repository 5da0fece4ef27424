"""Parameters as checkpoints store them, where that is by other names or in pieces: experts, one tensor for each."""
