"""The sites' side: one module per method, and the node that keeps them in memory."""
