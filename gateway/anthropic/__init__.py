"""Anthropic's Messages API, translated into what OpenAI's chat completions can ask for."""
