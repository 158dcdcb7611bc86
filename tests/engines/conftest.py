"""The fixtures that tests of engines and of learners share."""

from engine_fixtures import lane, make_observation, policy, run_policy

__all__ = ["lane", "make_observation", "policy", "run_policy"]
