"""The server's side: the ServerApp, the run loop, checkpoints and the ledger."""
