"""OpenAI's Responses API: `/v1/responses` and what is stored behind it."""
