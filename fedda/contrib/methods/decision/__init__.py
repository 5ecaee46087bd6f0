"""DECISION."""
