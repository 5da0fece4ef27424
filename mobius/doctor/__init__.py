"""`mobius doctor`: tells what this machine is good for, and what hurts it."""
