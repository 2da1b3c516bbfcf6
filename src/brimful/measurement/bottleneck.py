"""One line that says what limits a step, as far as the figures support it."""

from __future__ import annotations

from brimful.core.profile import Profile
from brimful.core.records import Lever
from brimful.core.units import share_text

#: Share of the step from which idle time is what there is to talk about.
_MUCH_IDLE = 0.15
#: Share of the computed tokens that are real, below which padding is worth a word.
_POORLY_FILLED = 0.8
#: Share of the model's own measured rate from which products are as fast as they get.
_NEAR = 0.8
#: A rate over its limit from which the limit was measured wrong.
_BEATEN = 1.2


def reading_of(profile: Profile) -> str:
    """Bottleneck of a step."""
    if _beaten(profile):
        return "the step was faster than the limits measured just before it: the device was busy then, profile again"
    idle = profile.part("idle").share
    if idle >= _MUCH_IDLE:
        return f"idle {share_text(idle)}: {_why_idle(profile)}"
    largest = max((part for part in profile.parts if part.name != "idle"), key=lambda part: part.seconds)
    said = f"{largest.name} take {share_text(largest.share)} of the step"
    if largest.name not in ("contractions", "copies"):
        said = said.replace(" take ", " takes ")
    said += _how_fast(profile, largest.name)
    if profile.rates.fill < _POORLY_FILLED:
        said += f"; {share_text(1 - profile.rates.fill)} of the computed tokens are padding"
    return said


def _beaten(profile: Profile) -> bool:
    rates, limits, execution = profile.rates, profile.limits, _execution(profile)
    # Compiled steps run gradients of weights beside those of activations, which products one after another are slower
    # than where one of them does not fill the GPU.
    beside = execution is not None and execution.value == "compiled"
    products = limits.matmul_flops_per_s if beside else limits.model_matmul_flops_per_s
    pairs = [(rates.contraction_flops_per_s, products), (rates.mfu, 1.0)]
    return any(rate is not None and limit is not None and rate > _BEATEN * limit for rate, limit in pairs)


def _why_idle(profile: Profile) -> str:
    time = profile.time
    idle_s = profile.part("idle").seconds
    if time.input_wait_s >= idle_s / 2:
        return "it waits for batches that are not ready (--num-workers, where there is a --transform)"
    if profile.recipe.device == "CPU":
        return "outside torch's operators, in Python: they are too small for it not to matter"
    execution = _execution(profile)
    if time.host_s >= 0.8 * time.mean_s and execution is not None and execution.value == "eager":
        said = f"the GPU waits for the host, which launches {profile.num_kernels:,.0f} kernels one by one"
        return f"{said}: use --execution captured" if execution.reason == "asked for" else f"{said}: {execution.reason}"
    return f"between kernels; the host is busy with launching for {share_text(time.host_s / time.mean_s)} of the step"


def _execution(profile: Profile) -> Lever | None:
    return next((lever for lever in profile.recipe.levers if lever.name == "execution"), None)


def _how_fast(profile: Profile, part: str) -> str:
    rates, limits = profile.rates, profile.limits
    if part == "contractions" and rates.contraction_flops_per_s is not None and limits.model_matmul_flops_per_s:
        share = rates.contraction_flops_per_s / limits.model_matmul_flops_per_s
        near = ": about as fast as they get in these shapes" if share >= _NEAR else ""
        return f", at {share_text(share)} of what the same products reach alone{near}"
    if part == "optimizer" and rates.optimizer_bytes_per_s is not None:
        return f", at {share_text(rates.optimizer_bytes_per_s / limits.copy_bytes_per_s)} of the rate of a copy"
    return ""
