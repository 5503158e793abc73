"""Calls of tools: how models are told of tools, how they write calls, and what holds them to it."""
