"""The fixtures that tests of engines and of learners share."""

from small_policies import lane, make_observation, play, policy

__all__ = ["lane", "make_observation", "play", "policy"]
