"""Who asks: from an API key or a token to the tenant that it stands for."""
