"""A black-box conformance suite for OpenAI-compatible servers: `headrace conformance URL`.

A row is one check of one behaviour (`row.py`). Rows know a server only by its socket (`server.py`,
`connection.py`), so they hold for any, and need no client library; those of the groups `…-client` are about
official ones, where these are installed (`client_library.py`, `node.py`).
"""
