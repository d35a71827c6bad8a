"""Comparing the options that something was made with to those of this run."""

from __future__ import annotations

import json
from typing import Any


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Options that differ between what was written and this run, in words.

    Example:
        >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3})
        ['b is 2 there and 3 here']
    """
    same = json.loads(json.dumps(here))
    names = [name for name in {**there, **same} if there.get(name) != same.get(name)]
    return [f"{name} is {there.get(name)} there and {same.get(name)} here" for name in names]
