"""A study of how well SRPO's reward ranks failures, on recorded LIBERO episodes with known true
progress.
"""
