"""The plan of an update: which rows make an optimizer step, which rank computes which of them.

    decisions ─► minibatches ─► rows with a gradient ─► plan_step ─► rank 0: micro-batch, ...
                 (by seed)      (if there are none,                  rank 1: micro-batch, ...
                                 no step)

Pure: it depends on the rows, the configuration and the number of ranks. One process is the plan of
one rank. Every divisor of a loss is counted here over the whole mini-batch, so the gradients of all
micro-batches of all ranks add up to the gradient of the mini-batch.

`TensorPlan` names the layers that tensor parallelism cuts; a policy's family makes it, and it is checked
without processes.

x ─► q, k, v     cut by outputs: each rank has its own heads      ─► o      cut by inputs ─► sum
x ─► gate, up    cut by outputs: each rank has its own numbers    ─► down   cut by inputs ─► sum
"""

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vla_rl.algorithms import Denominators, count_denominators
from vla_rl.errors import ConfigError
from vla_rl.learner.config import LearnerConfig, MicroBatchSize
from vla_rl.learner.rows import TokenColumns
from vla_rl.types import derive_seed


class LineSlot(NamedTuple):
    """Position of a row's first token."""

    line: int
    start: int


class Lines:
    """Lines of one width, each filled from its left.

    A tree over the free space finds the first line with enough of it in a number of steps that is
    logarithmic in the number of lines.

    Args:
        width: width of every line.
        num_lines: number of lines, at least one.
    """

    def __init__(self, width: int, num_lines: int) -> None:
        self._width, self._first_leaf = width, 1 << (num_lines - 1).bit_length()
        self._free = [-1] * (2 * self._first_leaf)
        self._free[self._first_leaf : self._first_leaf + num_lines] = [width] * num_lines
        for node in reversed(range(1, self._first_leaf)):
            self._free[node] = max(self._free[2 * node : 2 * node + 2])

    @property
    def most_free(self) -> int:
        """Free space on the line that has the most."""
        return self._free[1]

    def add_row(self, length: int) -> LineSlot | None:
        """Take `length` columns of the first line with enough free ones, and return where.

        None if no line has as many.
        """
        free, node = self._free, 1
        if free[node] < length:
            return None
        while node < self._first_leaf:
            node = 2 * node if free[2 * node] >= length else 2 * node + 1
        slot = LineSlot(node - self._first_leaf, self._width - free[node])
        free[node] -= length
        while node := node // 2:
            free[node] = max(free[2 * node], free[2 * node + 1])
        return slot


@dataclass(frozen=True)
class StepPlan:
    """The passes of one optimizer step, or of scoring."""

    ranks: tuple[tuple[Tensor, ...], ...]
    """Micro-batches of each rank, possibly none, as indices of their rows, int64 [M]. Rows without a
    gradient are in none."""

    denominators: Denominators
    """Divisors of the losses over all rows of all ranks."""

    @property
    def indices(self) -> list[Tensor]:
        """Rows of every micro-batch, rank by rank."""
        return [index for rank in self.ranks for index in rank]

    @property
    def num_planned_rows(self) -> int:
        """Number of rows in all micro-batches."""
        return sum(len(index) for index in self.indices)


def plan_minibatches(sequence: Tensor, config: LearnerConfig, weight_version: int) -> list[Tensor]:
    """Return the rows of each mini-batch, int64 [M], in the order of their optimizer steps.

    A trajectory is never split between two.

    Args:
        sequence: int64 [N], index of each row's trajectory.
        config: sizes, epochs and seed.
        weight_version: the learner's version, which the order depends on.

    Example:
        Five rows on two ranks, of which row 3 has no gradient:

        StepPlan(ranks=((tensor([0, 4]),), (tensor([1, 2]),)), denominators=...)
    """
    num_trajectories = int(sequence[-1]) + 1
    size = config.minibatch_trajectories or num_trajectories
    minibatches = []
    for epoch in range(config.epochs):
        # from the version, not from a generator that runs on: a resumed run draws the same order
        seed = derive_seed(config.seed, "minibatches", weight_version, epoch)
        order = torch.arange(num_trajectories)
        # in order if all are taken at once: a permutation would change the order of additions and
        # nothing else
        if size < num_trajectories:
            order = torch.randperm(num_trajectories, generator=torch.Generator().manual_seed(seed))
        # whole trajectories, because a sequence's ratio and its divisor are over all of its rows
        for chosen in torch.split(order, size):
            minibatches.append(torch.isin(sequence, chosen).nonzero()[:, 0])
    return [minibatch for minibatch in minibatches if len(minibatch)]


def rows_with_gradient(rows: TokenColumns, config: LearnerConfig) -> Tensor:
    """Return the rows of a mini-batch that can move the weights, int64 [M], rising.

    If no term works without an advantage, the loss of a row whose advantages are all 0 is constant.
    If there are no other rows, a step would only follow Adam's momentum.
    """
    has_other_terms = config.entropy_coef > 0.0 or config.loss.has_terms_without_advantage
    # GRPO groups with equal rewards have advantages of 0 in every row: often half of the rows
    can_move = torch.where(rows.mask, rows.advantage, 0.0).ne(0.0).any(1)
    # such a loss chooses tokens among all rows of its batch
    if has_other_terms or (config.loss.needs_chosen_tokens and bool(can_move.any())):
        can_move = torch.ones_like(can_move)
    return can_move.nonzero()[:, 0]


def plan_step(rows: TokenColumns, config: LearnerConfig) -> StepPlan:
    """Deal the rows with a gradient to the ranks, and cut each rank's rows into micro-batches.

    The divisors count all rows of the mini-batch. The ranks of a tensor group count as one: they
    compute the same rows.
    """
    # dealt by the tokens that a pass reads, prompts included: they take the time, whether they are
    # learnt or not
    computed = rows_with_gradient(rows, config)
    passes = plan_passes(
        rows.num_input_tokens[computed], config.micro_batch_size, config.row_groups
    )
    return StepPlan(
        tuple(tuple(computed[part] for part in rank) for rank in passes),
        count_denominators(rows.mask, rows.sequence, length=config.trajectory_length),
    )


def plan_passes(
    num_input_tokens: Tensor, size: MicroBatchSize, num_ranks: int
) -> tuple[tuple[Tensor, ...], ...]:
    """Return the micro-batches of each rank, as indices of rows."""
    return tuple(
        tuple(index[part] for part in micro_batches(num_input_tokens[index], size))
        if len(index)
        else ()
        for index in deal(num_input_tokens, num_ranks)
    )


def deal(num_input_tokens: Tensor, num_ranks: int) -> list[Tensor]:
    """Deal rows to ranks so that each reads about the same: indices int64 [M] by rank, rising.

    Args:
        num_input_tokens: int64 [N], number of tokens that a forward pass reads for each row.
        num_ranks: number of ranks, at least 1; ranks beyond the number of rows get none.

    The most loaded rank reads at most one row more than the mean.
    """
    if num_ranks == 1:
        return [torch.arange(len(num_input_tokens))]
    # rows and not episodes: with one episode a rank, the longest took 2.5 times the mean
    loads = [(0, 0, rank) for rank in range(num_ranks)]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    lengths = num_input_tokens.tolist()
    if lengths and min(lengths) == max(lengths):  # each in turn: what the heap would give, at once
        # 820,000 rows of an update on 512 ranks took 1.5 s, in which no rank learnt
        rows = torch.arange(len(lengths))
        return [rows[rank::num_ranks] for rank in range(num_ranks)]
    # the largest first, each to the rank with the least so far, so that small ones even out the end
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        load, count, rank = heapq.heappop(loads)
        dealt[rank].append(row)
        heapq.heappush(loads, (load + lengths[row], count + 1, rank))
    return [torch.tensor(sorted(rows), dtype=torch.long) for rows in dealt]


def rows_imbalance(num_input_tokens: Tensor, num_ranks: int) -> float:
    """Return the largest load of a rank over the mean load, at least 1."""
    loads = [int(num_input_tokens[index].sum()) for index in deal(num_input_tokens, num_ranks)]
    return max(loads) / (sum(loads) / num_ranks)


def micro_batches(num_input_tokens: Tensor, size: MicroBatchSize) -> list[Tensor]:
    """Return the row indices of each micro-batch, int64 [M], M >= 1; every row is in exactly one.

    Without a token limit, rows stay in order. With one, the longest rows come first. The lines of a
    micro-batch are as wide as its longest row, there are as many as the limit allows, and shorter
    rows share lines (`vla_rl.learner.plan`). A row that exceeds the limit is a micro-batch of its
    own.

    Args:
        num_input_tokens: int64 [N], number of tokens that a forward pass reads for each row.
        size: maximum number of rows, and of tokens.
    """
    if size.tokens is None:
        return list(torch.split(torch.arange(len(num_input_tokens)), size.rows))
    # longest first: the longest row sets the width of all lines, and shorter ones fill what is left
    order = torch.argsort(num_input_tokens, descending=True, stable=True)
    lengths = num_input_tokens[order].tolist()
    rising = [-length for length in lengths]
    left, parts = _RowsLeft(len(lengths)), []
    while (row := left.first_left(0)) < len(lengths):
        width = max(lengths[row], 1)
        lines = Lines(width, min(max(1, size.tokens // width), size.rows, len(lengths)))
        chosen: list[int] = []
        while row < len(lengths) and len(chosen) < size.rows:
            lines.add_row(lengths[row])
            left.take_row(row)
            chosen.append(row)
            # rows before the first that fits the largest free space are too long
            row = left.first_left(max(row, bisect_left(rising, -lines.most_free)))
        parts.append(order[torch.tensor(chosen)])
    return parts


class _RowsLeft:
    """Rows that were not taken yet; skipping those that were taken costs almost nothing."""

    def __init__(self, num_rows: int) -> None:
        self._next = list(range(num_rows + 1))

    def take_row(self, row: int) -> None:
        self._next[row] = row + 1

    def first_left(self, row: int) -> int:
        """Return the first row, from this one on, that is left; the number of rows if none is."""
        while self._next[row] != row:
            # path halving: walking over every taken row again would be quadratic in their number
            self._next[row] = self._next[self._next[row]]
            row = self._next[row]
        return row


@dataclass(frozen=True)
class TensorPlan:
    """Layers that the ranks of a tensor group share, by their names in the network."""

    by_outputs: tuple[str, ...]
    """Linear layers of which each rank computes a part of the outputs."""

    by_inputs: tuple[str, ...]
    """Linear layers of which each rank reads a part of the inputs; their outputs are added up."""

    of_heads: tuple[str, ...]
    """Norms of single heads: whole on every rank, and each rank's heads are a part of their
    gradient."""

    counts: Mapping[str, int]
    """Numbers that are dealt to the ranks, by what they are of."""

    def num_cut(self, network: nn.Module, *, is_trained: bool) -> int:
        """Return the numbers of the layers that are cut."""
        layers = (network.get_submodule(name) for name in (*self.by_outputs, *self.by_inputs))
        return sum(
            each.numel()
            for layer in layers
            for each in layer.parameters()
            if each.requires_grad == is_trained
        )


def get_tensor_plan(model: Any) -> TensorPlan:
    """Return the plan of a policy. Raises: ConfigError if its family has none."""
    planned: Callable[[], TensorPlan] | None = getattr(model, "tensor_plan", None)
    if planned is None:
        raise no_tensor_plan_error(type(model).__name__)
    return planned()


def no_tensor_plan_error(family: str) -> ConfigError:
    """Return the error about a family whose layers cannot be cut."""
    return ConfigError(
        f"{family} has no plan for tensor parallelism; expected OpenVLA, OpenVLA-OFT, or a language "
        "model of the kinds llama, qwen2 and qwen3: set --learner.tensor-parallel to 1, and take "
        "--learner.shard weights if a policy does not fit"
    )


def require_tensor_plan(model: Any, config: LearnerConfig) -> None:
    """Raise ConfigError if the ranks of a tensor group cannot share the policy's layers."""
    if config.tensor_parallel == 1:
        return
    # refused here, before a process is started and a policy is saved for it
    for what, count in get_tensor_plan(model).counts.items():
        if count % config.tensor_parallel:
            raise ConfigError(
                f"LearnerConfig.tensor_parallel is {config.tensor_parallel}, but the trunk of "
                f"{type(model).__name__} has {count} {what}; expected a divisor of {count}"
            )
