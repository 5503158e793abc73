"""The HTTP edge: who asks, what may run, where it runs, and the answer as OpenAI clients expect it."""
