"""f-DAN."""
