"""Traffic of somebody's production, replayed with its own times."""
