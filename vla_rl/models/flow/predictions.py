"""Predictions of a flow at a stored state, for losses that compare them with what was reached.

    next_state   mean of the state after the step, from x and v: linear in v
    actions      the actions at the end, less half the step's squared noise level times the noise estimate

The second is RLinf's "x0" for pi-StepNFT, with Flow-SDE's noise level; without noise it is the plain
estimate x - t v. With noise it is not the mean of the actions given the state, which its authors' code
marks as open.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from vla_rl.algorithms.losses.token_batch import Predicted
from vla_rl.engines.policy_model import Predictions
from vla_rl.models.flow.network import FlowInputs
from vla_rl.models.flow.sampler import scale_noise
from vla_rl.models.flow.transitions import Schedule, Transition, entropy, log_density


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


class StoredSteps(NamedTuple):
    """The counted numbers of the steps that N decisions have stored.

    Attributes:
        before: float32 [N, T], the states before.
        step: int64 [N].
        velocity: float32 [N, T], under the weights that acted.
        end: float32 [N, T], the ends of the chains.
    """

    before: Tensor
    step: Tensor
    velocity: Tensor
    end: Tensor

    @classmethod
    def from_inputs(cls, inputs: FlowInputs, count: Callable[[Tensor], Tensor]) -> "StoredSteps":
        """Take them from a learner's inputs; `count` returns the counted part of [N, H, P].

        Raises: ValueError for decisions that were stored without velocity and end.
        """
        before, step = inputs.state_before, inputs.step
        velocity, end = inputs.velocity, inputs.end
        if before is None or step is None or velocity is None or end is None:
            raise ValueError(
                "`drawn` has no velocity and end, expected both for a loss of predictions; record the "
                "decisions anew"
            )
        return cls(count(before), step, velocity, end)


def predict_decisions(
    schedule: Schedule,
    predicts: Predicted,
    stored: StoredSteps,
    velocity: Tensor,
    numbers: Tensor,
    noise_scale: Tensor,
) -> Predictions:
    """Return the predictions of stored decisions, under the present velocity and the one that acted.

    Args:
        schedule: how the stochastic step is taken.
        predicts: what is predicted.
        stored: what the decisions have drawn.
        velocity: float32 [N, T], under the present weights, with a gradient.
        numbers: float32 [N, T], the states after.
        noise_scale: float32 [N], a factor of the standard deviations.
    """

    def predict(target: Predicted, at: Tensor) -> StepPrediction:
        return predict_step(schedule, target, stored.before[:, None], at[:, None], stored.step)

    now, past = predict(predicts, velocity), predict(predicts, stored.velocity)
    mean = predict("next_state", velocity).prediction
    transition = scale_noise(Transition(mean, now.std), noise_scale)
    return Predictions(
        log_density(numbers[:, None], transition)[:, 0],
        entropy(transition)[:, None].expand_as(numbers),
        now.prediction[:, 0],
        past.prediction[:, 0],
        numbers if predicts == "next_state" else stored.end,
        transition.std[:, None],
        now.velocity_weight[:, None],
        stored.velocity,
    )
