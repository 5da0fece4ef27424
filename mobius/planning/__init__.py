"""A run is planned here: the plan for the machine that is there, the answer before the run, a plan from a file."""
