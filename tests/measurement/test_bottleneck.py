"""The one line under a profile says what its figures support, and no more."""

from __future__ import annotations

import dataclasses

import pytest

from brimful.core.profile import Profile
from brimful.measurement.bottleneck import reading_of
from profiles import PROFILE, changed, execution

_HOST_BOUND = dataclasses.replace(PROFILE.time, host_s=0.0095)
_WAITING = dataclasses.replace(PROFILE.time, input_wait_s=0.006)
_BEATEN = dataclasses.replace(PROFILE.rates, contraction_flops_per_s=600e12)
_EMPTY = dataclasses.replace(PROFILE.rates, fill=0.5)


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (PROFILE, "contractions take 50.0 % of the step, at 88.9 % of what the same products reach alone: about"),
        (changed(rates=_BEATEN), "the step was faster than the limits measured just before it"),
        (changed(rates=_BEATEN, recipe=execution("compiled", "asked for")), "at 133.3 % of what the same"),
        (changed(rates=_EMPTY), "; 50.0 % of the computed tokens are padding"),
        (changed({"optimizer": 0.01}), "optimizer takes 54.1 % of the step, at 50.0 % of the rate of a copy"),
        (changed({"attention": 0.05}), "attention takes 84.7 % of the step"),
        (
            changed({"idle": 0.0095}, time=_HOST_BOUND, recipe=execution("eager", "asked for")),
            "idle 50.0 %: the GPU waits for the host, which launches 151 kernels one by one: use --execution captured",
        ),
        (
            changed({"idle": 0.0095}, time=_HOST_BOUND, recipe=execution("eager", "padded batches have shapes")),
            "one by one: padded batches have shapes",
        ),
        (changed({"idle": 0.0095}), "between kernels; the host is busy with launching for 10.0 % of the step"),
        (changed({"idle": 0.0095}, time=_WAITING), "idle 50.0 %: it waits for batches that are not ready"),
    ],
)  # fmt: skip
def test_readings(profile: Profile, said: str) -> None:
    assert said in reading_of(profile)
