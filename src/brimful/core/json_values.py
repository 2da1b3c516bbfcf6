"""One value as JSON text, with all digits of a decimal. Files of rows are read and written by the same rules."""

from __future__ import annotations

import base64
import decimal
import math
import re
import uuid
from typing import Any

from brimful.core.records import json_text

#: Begins a JSON string that is to be a number. No text can have it by intent: each process has its own.
_MARK = uuid.uuid4().hex
_MARKED = re.compile(f'"{_MARK}([-0-9.]+)"')


def value_as_json(value: Any) -> str:
    """One line of JSON: bytes in base64, decimals with all digits, NaN and infinities as null."""
    try:
        text = json_text(value, default=_in_json)
    except ValueError:
        text = json_text(_finite(value), default=_in_json)
    return _MARKED.sub(r"\1", text) if _MARK in text else text


def value_as_text(value: object) -> str:
    """A value that JSON does not have as text: a decimal's digits, bytes in base64."""
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _in_json(value: object) -> str:
    """A decimal as a marked string: a float has fewer digits."""
    return f"{_MARK}{value:f}" if isinstance(value, decimal.Decimal) else value_as_text(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
