"""Mixture-of-experts layers: each token goes to a few of the experts, chosen by its router."""
