"""The engine's end of the wire: one ROUTER socket and the queues on both sides of the step loop."""
