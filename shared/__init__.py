"""What several services speak: messages, configuration, text, the Redis schema, telemetry names."""
