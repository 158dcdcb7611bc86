"""The filter of groups: which complete groups are kept, and when too few are."""

import logging
from collections.abc import Callable
from typing import Final

from vla_rl.types import Group

logger = logging.getLogger(__name__)

WARN_EVERY: Final = 10
"""Groups filtered in a row between two warnings."""


class GroupFilter:
    """Asks `keep` about each complete group, and fails instead of filtering for ever.

    Args:
        keep: returns whether to keep a group; None keeps all.
        max_in_a_row: groups filtered in a row, with none kept, after which it fails; None: never.
    """

    def __init__(self, keep: Callable[[Group], bool] | None, max_in_a_row: int | None) -> None:
        self._keep, self._max_in_a_row = keep, max_in_a_row
        self._num_in_a_row = 0

    def is_kept(self, group: Group) -> bool:
        """Return whether to keep a group. Raises: what `keep` raises."""
        is_kept = self._keep is None or self._keep(group)
        self._num_in_a_row = 0 if is_kept else self._num_in_a_row + 1
        return is_kept

    def require_some_kept(self, update: int) -> None:
        """Warn or raise RuntimeError if no group was kept for long.

        Args:
            update: the update that waits for a group.
        """
        number = self._num_in_a_row
        if number and number % WARN_EVERY == 0:
            logger.warning(
                "%d groups in a row were filtered and none was kept: update %d is waiting for one",
                number,
                update,
            )
        # without a limit, a filter that no group passes would keep every environment busy for ever
        if self._max_in_a_row is not None and number >= self._max_in_a_row:
            raise RuntimeError(
                f"{number} groups in a row were filtered and none was kept, so update "
                f"{update} would never be filled; loosen the filter, choose tasks that are "
                "sometimes solved, or raise max_filtered_in_a_row"
            )
