"""NavSim's and Bench2Drive's scores as pure functions over batches, with numpy alone.

    from vla_rl.envs.driving.scores import Scene, score_waypoints
    scores = score_waypoints(scene, waypoints, "epdms_v2")

Units are metres, seconds and radians; x is forward, y left, angles counter-clockwise. CARLA's
left-handed frame and degrees are converted where CARLA is read.
"""

from vla_rl.envs.driving.scores.comfort import extended_comfort
from vla_rl.envs.driving.scores.pdm import (
    MULTIPLIERS,
    WEIGHTS,
    PdmScores,
    Version,
    benchmark_score,
    human_sub_scores,
    score_poses,
    score_states,
    score_waypoints,
    second_stage_weights,
    two_stage_score,
    with_extended_comfort,
    with_human_filter,
)
from vla_rl.envs.driving.scores.scene import PACIFICA, Map, RedLights, Scene, Tracks, Vehicle

__all__ = [
    "MULTIPLIERS",
    "PACIFICA",
    "WEIGHTS",
    "Map",
    "PdmScores",
    "RedLights",
    "Scene",
    "Tracks",
    "Vehicle",
    "Version",
    "benchmark_score",
    "extended_comfort",
    "human_sub_scores",
    "score_poses",
    "score_states",
    "score_waypoints",
    "second_stage_weights",
    "two_stage_score",
    "with_extended_comfort",
    "with_human_filter",
]
