"""Co-MDA."""
