"""Parameters stored under other names or in pieces, such as one tensor per expert."""
