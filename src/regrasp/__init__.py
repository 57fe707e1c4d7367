"""Regrasp: make a robot policy better from its own logged experience."""
