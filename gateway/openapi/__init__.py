"""The OpenAPI document: the HTTP interface as a machine reads it, made from the types that check requests."""
