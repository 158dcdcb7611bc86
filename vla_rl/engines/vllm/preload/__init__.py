"""A folder for the PYTHONPATH of engine processes; `sitecustomize` is what Python itself imports from it first."""
