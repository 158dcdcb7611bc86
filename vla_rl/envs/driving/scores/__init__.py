"""NavSim's and Bench2Drive's scores as pure functions over batches, with numpy alone.

    from vla_rl.envs.driving.scores import Scene, score_waypoints
    scores = score_waypoints(scene, waypoints, "epdms_v2")

Units are metres, seconds and radians; x is forward, y left, angles counter-clockwise. CARLA's
left-handed frame and degrees are converted where CARLA is read.
"""

from vla_rl.envs.driving.scores.comfort import extended_comfort as extended_comfort
from vla_rl.envs.driving.scores.pdm import (
    PdmScores as PdmScores,
    Version as Version,
    benchmark_score as benchmark_score,
    human_sub_scores as human_sub_scores,
    score_poses as score_poses,
    score_waypoints as score_waypoints,
    second_stage_weights as second_stage_weights,
    two_stage_score as two_stage_score,
    with_extended_comfort as with_extended_comfort,
    with_human_filter as with_human_filter,
)
from vla_rl.envs.driving.scores.scene import (
    PACIFICA as PACIFICA,
    Map as Map,
    RedLights as RedLights,
    Scene as Scene,
    Tracks as Tracks,
)
