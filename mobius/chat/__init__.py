"""Conversations with a trained model in the terminal."""
