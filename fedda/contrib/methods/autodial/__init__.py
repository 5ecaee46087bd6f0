"""AutoDIAL."""
