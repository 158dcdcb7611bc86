"""How well SRPO's reward ranks failures, on recorded LIBERO episodes whose true progress is known."""
