"""Measurements, each a ratio of us to a peer or to the machine's limit in one run; the last line printed is one JSON object."""
