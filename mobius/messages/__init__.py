"""How ranks talk: transports of activations, mailboxes, and meetings in which ranks agree."""
