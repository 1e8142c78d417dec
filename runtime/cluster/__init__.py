"""Controller, relays and keepers of several hosts: their lines, their messages, and the memory of each node."""
