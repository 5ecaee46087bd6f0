"""What people bring, a table of trials for each kind, each with its right value."""
