"""`/admin`: what an operator sees and changes, behind a token of its own."""
