"""Usage records of this gateway: collected while requests end, written beside them."""
