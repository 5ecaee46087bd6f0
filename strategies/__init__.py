"""The rounds: one Flower strategy per method."""
