"""A model in the caller's process, without gateway or sockets, under the names of vLLM's classes.

`llm.py` and `async_llm.py` are what users hold. Both hand requests to `engine_worker.py`, which owns the
engine and the one thread that computes, and get back the same `OfflineRequest` objects as they grow.
"""
