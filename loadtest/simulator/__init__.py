"""Engines whose speed is known beforehand, so that what measures them can be tested."""
