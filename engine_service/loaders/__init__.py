"""Model files to weights and text bundle, one module per file format."""
