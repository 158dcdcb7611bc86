"""transformers imports SciPy and scikit-learn only once it calls them; test_torchvision_operators.py
looks at a process that has called neither.
"""

from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
import transformers.utils

from vla_rl import lazy_scipy


@pytest.mark.parametrize("name", lazy_scipy.USES)
def test_a_module_of_transformers_asks_for_the_package_and_calls_its_function(name: str) -> None:
    module, use = import_module(name), lazy_scipy.USES[name]
    assert getattr(module, use.asked)()
    function = getattr(module, use.function)
    assert function.__module__ == lazy_scipy.__name__
    if use.function == "roc_curve":
        given = np.array([0, 1, 1]), np.array([0.1, 0.4, 0.3])
    else:
        given = (np.array([[4.0, 1.0], [2.0, 0.0]]),)
    expected = getattr(import_module(use.package), use.function)(*given)
    np.testing.assert_equal(function(*given), expected)


def test_where_a_package_is_missing_the_module_is_as_transformers_wrote_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (name, use), module = next(iter(lazy_scipy.USES.items())), ModuleType("executed")
    monkeypatch.setattr(transformers.utils, use.asked, lambda: False)
    executed = []
    lazy_scipy._execute(use, executed.append, module)
    assert executed == [module]
    assert not hasattr(module, use.function), name
