"""What the figures of an experiment say, and how sure that is."""
