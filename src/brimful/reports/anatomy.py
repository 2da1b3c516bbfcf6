"""A profile as text: what the step's time is spent on, its longest kernels, and what it achieved."""

from __future__ import annotations

from brimful.core.errors import printable
from brimful.core.profile import Kernel, Part, Profile
from brimful.core.units import bytes_text, count_text, share_text

#: Kernels that are listed, unless fewer take nearly all the time.
_MOST_KERNELS = 15
#: Kernels below this share of the step are not worth a line, except what no rule knows.
_LEAST_SHARE = 0.005
#: Widest name of a kernel.
_NAME = 72


def anatomy_text(profile: Profile) -> str:
    """The whole report, lines of at most 110 characters, without a line break at its end."""
    on_gpu = profile.recipe.device != "CPU"
    parts = (_step(profile), _parts(profile, on_gpu), _kernels(profile, on_gpu), _achieved(profile, on_gpu))
    return "\n\n".join([*parts, f"Reading  {profile.reading}"])


def _step(profile: Profile) -> str:
    time, work = profile.time, profile.work
    execution = profile.recipe.value("execution")
    how = f"{'packed' if profile.packed else 'padded'}, {execution}, {profile.recipe.value('precision')}"
    lines = [
        f"One step  {_ms(time.mean_s)} on {printable(profile.recipe.device)}: {how}",
        f"  over {profile.steps} steps: median {_ms(time.median_s)}, from {_ms(time.fastest_s)} to"
        f" {_ms(time.slowest_s)}; {_ms(time.recorded_s)} while recorded",
        f"  {_number(work.samples)} samples, {_number(work.tokens)} tokens of {_number(work.computed_tokens)} computed"
        f" ({share_text(profile.rates.fill)} filled), {work.micro_batches:.3g} micro-batches",
        f"  {count_text(profile.rates.samples_per_s)} samples/s, {count_text(profile.rates.tokens_per_s)} tokens/s",
    ]
    return "\n".join(lines)


def _parts(profile: Profile, on_gpu: bool) -> str:
    noun = "kernels" if on_gpu else "calls"
    rows = [_part(part) for part in profile.parts if part.seconds or part.name in ("contractions", "idle")]
    total = f"  {'the step':<14}{_cell(profile.time.mean_s)}{share_text(1.0):>9}{profile.num_kernels:>10,.0f}"
    return "\n".join([f"{'Where it goes':<16}{'ms':>10}{'share':>9}{noun:>10}", *rows, total])


def _part(part: Part) -> str:
    count = "" if part.name == "idle" else f"{part.count:,.0f}"
    return f"  {part.name:<14}{_cell(part.seconds)}{share_text(part.share):>9}{count:>10}".rstrip()


def _kernels(profile: Profile, on_gpu: bool) -> str:
    least_s = _LEAST_SHARE * profile.time.mean_s
    listed = [kernel for kernel in profile.kernels[:_MOST_KERNELS] if kernel.seconds >= least_s]
    unknown = [k for k in profile.kernels if k.part == "other" and k.seconds >= least_s and k not in listed]
    rest = [kernel for kernel in profile.kernels if kernel not in listed and kernel not in unknown[:_MOST_KERNELS]]
    lines = [f"{'Longest kernels' if on_gpu else 'Longest operators':<18}{'ms':>8}{'times':>8}  part"]
    lines += [_kernel(kernel) for kernel in [*listed, *unknown[:_MOST_KERNELS]]]
    if rest:
        seconds, count = sum(kernel.seconds for kernel in rest), sum(kernel.count for kernel in rest)
        lines.append(f"  {'':<12}{_cell(seconds, 12)}{count:>8,.0f}  {len(rest):,} more")
    return "\n".join(lines)


def _kernel(kernel: Kernel) -> str:
    name = printable(kernel.name.removeprefix("void ").removeprefix("autograd::engine::evaluate_function: "), _NAME)
    return f"  {'':<12}{_cell(kernel.seconds, 12)}{kernel.count:>8,.0f}  {kernel.part:<14}{name}"


def _achieved(profile: Profile, on_gpu: bool) -> str:
    rates, limits, time = profile.rates, profile.limits, profile.time
    square, own = limits.matmul_flops_per_s, limits.model_matmul_flops_per_s
    rows = [
        ("MFU, real tokens", share_text(rates.mfu), f"of {_flops(square)}: a large matrix product, measured here"),
        ("", share_text(rates.datasheet_mfu), f"of {_flops(limits.datasheet_flops_per_s)}: dense, by the datasheet"),
        ("contractions", _flops(rates.contraction_flops_per_s), _share_of(rates.contraction_flops_per_s, square)),
        ("", "", f"{_share_of(rates.contraction_flops_per_s, own)} that the model's own products reach alone"),
        ("attention", _flops(rates.attention_flops_per_s), _share_of(rates.attention_flops_per_s, square)),
        ("optimizer", _bytes(rates.optimizer_bytes_per_s), _copy_share(profile)),
    ]
    if limits.datasheet_flops_per_s is None:
        del rows[1]
    rows.append(("host", _ms(time.host_s), "to launch a step" + _launches(profile) if on_gpu else "in a step"))
    rows.append(("input", _ms(time.input_wait_s), "waited for a batch"))
    peak = profile.peak_bytes
    if peak.allocated is not None:
        used = f"allocated, {bytes_text(peak.reserved)} reserved, {bytes_text(peak.nvml)} by the driver"
        rows.append(("peak memory", bytes_text(peak.allocated), used))
    width = max(len(value) for _, value, _ in rows)
    return "\n".join(["Achieved", *(f"  {name:<18}{value:<{width}}  {of}".rstrip() for name, value, of in rows)])


def _copy_share(profile: Profile) -> str:
    moved, copied = profile.rates.optimizer_bytes_per_s, profile.limits.copy_bytes_per_s
    return "" if moved is None else f"{share_text(moved / copied)} of the {_bytes(copied)} of a copy"


def _launches(profile: Profile) -> str:
    if profile.num_launches is None:
        return ""
    return f": {profile.num_launches:,.0f} launches for {profile.num_kernels:,.0f} kernels"


def _share_of(rate: float | None, limit: float | None) -> str:
    return "of unknown" if rate is None or limit is None else f"{share_text(rate / limit)} of the {_flops(limit)}"


def _flops(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate / 1e12:.3g} TFLOP/s"


def _bytes(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate / 1e9:,.3g} GB/s" if rate < 1e12 else f"{rate / 1e12:.3g} TB/s"


def _number(number: float) -> str:
    return f"{number:,.0f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.2f} ms"


def _cell(seconds: float, width: int = 10) -> str:
    return f"{seconds * 1000:>{width},.3f}"
