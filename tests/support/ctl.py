"""colibrictl in tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from click.testing import Result

# Runs a command line: ctl("sessions", "list", stdin=None).
Ctl = Callable[..., Result]


def as_json(result: Result) -> Any:
    """The one JSON value that a command printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
