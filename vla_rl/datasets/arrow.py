"""pyarrow, imported when a function first uses it: it comes with an extra, and most runs read none of its files.

Quote annotations that name its types, because Python evaluates them when it reads the function.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["pa", "pq"]

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:

    class _LazyModule:
        def __init__(self, name: str) -> None:
            self._module = name

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self._module), name)

    pa, pq = _LazyModule("pyarrow"), _LazyModule("pyarrow.parquet")
