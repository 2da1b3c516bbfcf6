"""A profile as text: the step's time by class of work, its longest kernels, and the rates it reached."""

from __future__ import annotations

from brimful.core.errors import printable
from brimful.core.profile import Profile
from brimful.core.units import count_text, share_text
from brimful.reports.memory_text import memory_text

#: Kernels that are listed at most, and as many again of those that no rule knows.
_MOST_KERNELS = 15
#: Share of the step from which a kernel is listed.
_LEAST_SHARE = 0.005
#: Widest name of a kernel.
_NAME = 70
#: Factor by which recording lengthens kernels, from which a line says so.
_MUCH_STRETCH = 1.02


def profile_text(profile: Profile) -> str:
    """The whole report, without a line break at its end."""
    on_gpu = profile.recipe.device != "CPU"
    parts = (_step(profile), _parts(profile, on_gpu), _kernels(profile, on_gpu), _achieved(profile, on_gpu))
    return "\n\n".join([*parts, f"Bottleneck  {profile.reading}"])


def _step(profile: Profile) -> str:
    time, work = profile.time, profile.work
    execution = profile.recipe.value("execution")
    how = f"{'packed' if profile.packed else 'padded'}, {execution}, {profile.recipe.value('precision')}"
    noun = "micro-batch" if work.micro_batches == 1 else "micro-batches"
    lines = [
        f"One step  {_ms(time.mean_s)} on {printable(profile.recipe.device)}: {how}",
        f"  over {profile.steps} steps: median {_ms(time.median_s)}, from {_ms(time.fastest_s)} to"
        f" {_ms(time.slowest_s)}; {_ms(time.recorded_s)} while recorded",
        f"  {work.samples:,.0f} samples, {work.tokens:,.0f} tokens of {work.computed_tokens:,.0f} computed"
        f" ({share_text(profile.rates.fill)} filled), {work.micro_batches:.3g} {noun}",
        f"  {count_text(profile.rates.samples_per_s)} samples/s, {count_text(profile.rates.tokens_per_s)} tokens/s",
    ]
    if profile.communication is not None:
        lines[-1] += f", of process 0 alone; {profile.communication.processes} share a batch"
    return "\n".join(lines)


def _parts(profile: Profile, on_gpu: bool) -> str:
    lines = [f"{'Where it goes':<16}{'ms':>10}{'share':>9}{'kernels' if on_gpu else 'calls':>10}"]
    shown = [part for part in profile.parts if part.name != "communication" or part.count]
    lines += [_row(part.name, part.seconds, profile, part.count) for part in shown]
    lines.append(_row("the step", profile.time.mean_s, profile, profile.num_kernels))
    if profile.stretch >= _MUCH_STRETCH:
        lines.append(
            f"  recording made kernels {share_text(profile.stretch - 1)} longer; the times above are corrected for it"
        )
    return "\n".join(lines)


def _kernels(profile: Profile, on_gpu: bool) -> str:
    least_s = _LEAST_SHARE * profile.time.mean_s
    worth = [kernel for kernel in profile.kernels if kernel.seconds >= least_s]
    listed = worth[:_MOST_KERNELS] + [k for k in worth[_MOST_KERNELS:] if k.part == "other"][:_MOST_KERNELS]
    lines = [f"{'Longest kernels' if on_gpu else 'Longest calls':<16}{'ms':>10}{'share':>9}{'times':>10}"]
    for kernel in listed:
        name = kernel.name.removeprefix("void ").removeprefix("autograd::engine::evaluate_function: ")
        lines.append(f"{_row(kernel.part, kernel.seconds, profile, kernel.count)}  {printable(name, _NAME)}")
    rest = [kernel for kernel in profile.kernels if kernel not in listed]
    if rest:
        seconds, count = sum(kernel.seconds for kernel in rest), sum(kernel.count for kernel in rest)
        lines.append(f"{_row('', seconds, profile, count)}  {len(rest):,} more")
    return "\n".join(lines)


def _row(name: str, seconds: float, profile: Profile, count: float) -> str:
    """Name, milliseconds, share of the step, and how often where it is not idle."""
    times = "" if name == "idle" else f"{count:,.0f}"
    share = share_text(seconds / profile.time.mean_s)
    return f"  {name:<14}{seconds * 1000:>10,.3f}{share:>9}{times:>10}".rstrip()


def _achieved(profile: Profile, on_gpu: bool) -> str:
    rates, limits, time = profile.rates, profile.limits, profile.time
    square, own = limits.matmul_flops_per_s, limits.model_matmul_flops_per_s
    moved, copied = rates.optimizer_bytes_per_s, limits.copy_bytes_per_s
    of_copy = "" if moved is None else f"{share_text(moved / copied)} of the {_bytes(copied)} of a copy"
    launches = "to launch a step" if on_gpu else "in a step"
    if on_gpu and profile.num_launches is not None:
        launches += f": {profile.num_launches:,.0f} launches for {profile.num_kernels:,.0f} kernels"
    rows = [
        ("MFU, real tokens", share_text(rates.mfu), f"of {_flops(square)}: a large matrix product, measured here"),
        ("", share_text(rates.datasheet_mfu), f"of {_flops(limits.datasheet_flops_per_s)}: dense, by the datasheet"),
        ("contractions", _flops(rates.contraction_flops_per_s), _share_of(rates.contraction_flops_per_s, square)),
        ("", "", f"{_share_of(rates.contraction_flops_per_s, own)} that the model's own products reach alone"),
        ("attention", _flops(rates.attention_flops_per_s), _share_of(rates.attention_flops_per_s, square)),
        ("optimizer", _bytes(moved), of_copy),
    ]
    if limits.datasheet_flops_per_s is None:
        del rows[1]
    rows.append(("host", _ms(time.host_s), launches))
    if (sums := profile.communication) is not None:
        among = f"{sums.processes} processes, the one with the most tokens has {sums.imbalance:.3f} of the mean"
        if sums.seconds is None or sums.hidden_s is None:
            rows.append(("sums on their way", "", f"the host does not see them; {among}"))
        else:
            hidden = share_text(sums.hidden_s / sums.seconds)
            rows.append(("sums on their way", _ms(sums.seconds), f"{hidden} of it beside other work; {among}"))
    rows.append(("input", _ms(time.input_wait_s), "waited for a batch"))
    width = max(len(value) for _, value, _ in rows)
    lines = [f"  {name:<18}{value:<{width}}  {of}".rstrip() for name, value, of in rows]
    if (memory := memory_text(profile.peak_bytes)) is not None:
        lines.append(f"  {'peak memory':<18}{memory}")
    return "\n".join(["Achieved", *lines])


def _share_of(rate: float | None, limit: float | None) -> str:
    return "of unknown" if rate is None or limit is None else f"{share_text(rate / limit)} of the {_flops(limit)}"


def _flops(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate / 1e12:.3g} TFLOP/s"


def _bytes(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate / 1e9:,.3g} GB/s" if rate < 1e12 else f"{rate / 1e12:.3g} TB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.2f} ms"
