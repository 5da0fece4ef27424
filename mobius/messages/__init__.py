"""Communication between ranks: activation transports, mailboxes and the rendezvous."""
