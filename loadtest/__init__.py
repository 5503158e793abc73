"""Load generator and its measurements."""
