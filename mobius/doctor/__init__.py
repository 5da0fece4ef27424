"""`mobius doctor`: reports what this machine is good for, and what makes it slow."""
