"""Centring."""
