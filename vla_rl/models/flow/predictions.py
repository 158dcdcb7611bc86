"""Predictions of a flow at a stored state, for losses that compare them with what was reached.

    next_state   mean of the state after the step, from x and v: linear in v
    actions      the actions at the end, less half the step's squared noise level times the noise estimate

The second is RLinf's "x0" for pi-StepNFT; without noise it is the plain estimate x - t v. With noise it is not
the mean of the actions given the state, which its authors' code marks as open.
"""

from typing import NamedTuple

from torch import Tensor

from vla_rl.algorithms.losses.token_batch import Predicted
from vla_rl.models.flow.transitions import Schedule


class StepPrediction(NamedTuple):
    """Predictions for N decisions.

    Attributes:
        prediction: float32 [N, H, P].
        std: float32 [N], standard deviation of the step; 0 without noise.
        velocity_weight: float32 [N], derivative of the prediction by the velocity.
    """

    prediction: Tensor
    std: Tensor
    velocity_weight: Tensor


def predict_step(
    schedule: Schedule, predicts: Predicted, x: Tensor, velocity: Tensor, step: Tensor
) -> StepPrediction:
    """Predict from stored states.

    Args:
        schedule: how the stochastic step is taken.
        predicts: what is predicted.
        x: float32 [N, H, P], states before the step.
        velocity: float32 [N, H, P], at x and the step's time.
        step: int64 [N], 0 to K - 1.
    """
    mean, std = schedule.transition(x, velocity, step)
    weights = x.new_tensor([each[1] for each in schedule.step_weights()])
    if predicts == "next_state":
        return StepPrediction(mean, std, weights[step])
    time = schedule.times(step)
    # the squared noise level, from the step's deviation: s^2 = sigma^2 / K
    half = 0.5 * schedule.num_steps * std.square()
    weight = -(time + (1.0 - time) * half)
    prediction = (1.0 - half)[:, None, None] * x + weight[:, None, None] * velocity
    return StepPrediction(prediction, std, weight)
