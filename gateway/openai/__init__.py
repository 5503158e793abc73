"""OpenAI's HTTP interface: what clients send, and the exact form of what they get back."""
