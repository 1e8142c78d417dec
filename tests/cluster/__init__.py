"""A whole cluster under faults: the harness, and what it reports."""
