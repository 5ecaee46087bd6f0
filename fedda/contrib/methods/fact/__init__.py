"""FACT."""
