"""How fast the machine is: profiles measured with the shapes of a run, and kept."""
