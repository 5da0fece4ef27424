"""Layers of several feed-forward parts, the experts, of which each token takes a few that its router chooses."""
