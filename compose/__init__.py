"""Putting the services together: the `headrace` command, the supervisor, containers."""
