"""Communication between ranks: rendezvous, transports, mailboxes, replicas, checks and the watchdog."""
