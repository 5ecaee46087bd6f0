"""SHOT-IM and a small network, as a package of their own: fedda finds them by entry points."""
