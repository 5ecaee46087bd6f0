"""One module per method: its formulas, settings and contract."""
