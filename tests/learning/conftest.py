"""The fixtures that tests of engines and of learners share."""

from engine_fixtures import lane, make_observation, play, policy

__all__ = ["lane", "make_observation", "play", "policy"]
