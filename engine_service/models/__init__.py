"""Decoder architectures, written for paged KV."""
