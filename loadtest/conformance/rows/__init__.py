"""The rows, a module for each group."""
