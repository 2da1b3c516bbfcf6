"""A profile to JSON and back."""

from __future__ import annotations

import json

from brimful.core.profile import Kernel, Part, Profile
from brimful.core.records import from_json, to_json
from profiles import PROFILE


def test_a_profile_comes_back_equal() -> None:
    back = from_json(Profile, to_json(PROFILE))
    assert back == PROFILE
    assert isinstance(back.parts[0], Part)
    assert isinstance(back.kernels[0], Kernel)


def test_what_is_unknown_is_null() -> None:
    assert json.loads(to_json(PROFILE))["peak_bytes"]["nvml"] is None


def test_a_part_by_name() -> None:
    assert PROFILE.part("optimizer").seconds == 0.0015
