"""Measurements, each a ratio of us to a peer or to the machine's limit in one run; the last line is one JSON object."""
