"""Sums over sequences (trajectories) whose tokens are in several rows."""

from vla_rl.algorithms.lazy_torch import Tensor, torch


class SequencesOfRows:
    """Assignment of rows to sequences.

    Args:
        mask: bool [B, T], for the number of rows and the device.
        sequence: int64 [B], id of the sequence that each row belongs to; None: every row is one.

    Raises: ValueError if there are not as many ids as rows.
    """

    def __init__(self, mask: Tensor, sequence: Tensor | None) -> None:
        if sequence is None:
            # not by `unique`, which on a GPU waits for the number of ids
            self.position, self.size = torch.arange(len(mask), device=mask.device), len(mask)
            return
        if sequence.shape != mask.shape[:1]:
            raise ValueError(
                f"sequence is {list(sequence.shape)}, expected {list(mask.shape[:1])}: one id per "
                "row of mask."
            )
        ids, self.position = torch.unique(sequence.to(mask.device), return_inverse=True)
        self.size = len(ids)

    def by_sequence(self, values: Tensor) -> Tensor:
        """Sum float [B, T] over each sequence: [sequences]."""
        return values.new_zeros(self.size).index_add_(0, self.position, values.sum(dim=1))

    def sums(self, values: Tensor) -> Tensor:
        """Sum float [B, T] over the whole sequence of each row: [B]."""
        return self.by_sequence(values)[self.position]

    def means(self, values: Tensor, counted: Tensor) -> Tensor:
        """Average float [B, T] over the counted tokens of each row's sequence: [B, 1].

        0 if none is counted.
        """
        sums = self.sums(torch.where(counted, values, 0.0))
        return (sums / self.sums(counted.to(values.dtype)).clamp(min=1))[:, None]
