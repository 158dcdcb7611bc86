"""Parts that simulators on MuJoCo share: loading it quietly, OpenGL without a screen, cameras and
their quality.

LIBERO and Meta-World are built on it. Importing this package loads neither MuJoCo nor OpenGL.
"""
