"""Which variants of a route see a request: the one that answers, those in its place, and the shadow."""
