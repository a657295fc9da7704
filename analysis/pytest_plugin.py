"""What pytest finds by itself where klgrad is installed: the assertions of ``klgrad.analysis.testing`` as fixtures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def _offered(name: str) -> Any:
    def assertion() -> Callable[..., Any]:
        from klgrad.analysis import testing  # imported when a test asks for it: every pytest run loads this module

        found: Callable[..., Any] = getattr(testing, name)
        return found

    assertion.__doc__ = f"``klgrad.analysis.testing.{name}``."
    return pytest.fixture(scope="session", name=name)(assertion)


assert_gradient = _offered("assert_gradient")
assert_value = _offered("assert_value")
assert_finite = _offered("assert_finite")
assert_mask_invariant = _offered("assert_mask_invariant")
