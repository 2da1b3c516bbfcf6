"""A bench with figures that nobody measured: for its text and its page."""

from __future__ import annotations

from typing import Any

from brimful.benchmarking.rows import recommended_of, rows_of
from brimful.core.bench import Bench, BenchRow, Measured, Row, Steps, Workload
from brimful.core.options.bench import BenchOptions
from brimful.core.records import Gpu, Lever, Machine, PeakMemory, Recipe

GIB = 1 << 30
PARTS = ("weights", "gradients", "optimizer_states", "activations", "temporaries", "workspaces", "unused")


def figures(rate: float, gib: float, **more: Any) -> Measured:
    """Figures of a row on a GPU: samples a second, and GiB by the driver."""
    parts = {name: int(gib * GIB / 8) for name in (*PARTS, "outside_torch")}
    given: dict[str, Any] = {
        "samples_per_s": rate, "block_rates": (0.9 * rate, rate, 1.1 * rate), "step_s": 4 / rate, "loss": 0.7,
        "tokens_per_s": 512 * rate, "precision": "fp32", "arithmetic": "exact", "mfu": 0.25,
        "nvml_bytes": int(gib * GIB), "peak_bytes": PeakMemory(total=int(gib * GIB), components=parts),
    }  # fmt: skip
    return Measured(**{**given, **more})


def recipe(*levers: tuple[str, str, Any]) -> Recipe:
    return Recipe(device="GPU", levers=tuple(Lever(name=n, value=v, arithmetic=a, reason="r") for n, v, a in levers))


def measured(row: Row, *given: Any, **more: Any) -> BenchRow:
    return BenchRow(row=row, status="measured", measured=figures(*given, **more), wall_s=20.0)


def guide_bench(name: str = "bert-large", *, data: str | None = None) -> Bench:
    """The guide's rows on a GPU: one out of memory, one failed, one left, the others faster the further down."""
    options = BenchOptions(model=name, rows="guide", batch_size=4)
    rows = []
    for number, row in enumerate(rows_of(options, longest=512, on_gpu=True), 1):
        if row.key == "brimful: Adafactor":
            rows.append(BenchRow(row=row, status="out_of_memory", reason=f"{name}: tried to allocate 2 GiB"))
        elif row.key == "brimful: 8-bit Adam":
            rows.append(BenchRow(row=row, status="failed", reason="needs the package bitsandbytes"))
        elif row.key == "brimful: fp16":
            rows.append(BenchRow(row=row, status="left", reason="no time left"))
        else:
            more = {"recipe": recipe(("packing", "packed", "exact"))} if row.side == "brimful" else {}
            rows.append(measured(row, 10.0 * number, 9 - 0.2 * number, **more))
    best = next(each.row for each in rows if each.row.key == "brimful: bf16")
    rows.append(measured(recommended_of(best), 111.0, 5.0, recipe=recipe(("packing", "packed", "exact"))))
    machine = Machine(
        cpu="a CPU", num_cores=16, memory_bytes=1 << 37, gpus=(Gpu(name="a GPU"),), versions={"torch": "2"}
    )
    work = Workload(
        device="a GPU", task="single_label", labels=2, rows=512, batch_size=4, median_tokens=512, longest_tokens=512,
        data_fingerprint="ab" * 32, model_type="bert", parameters=335_000_000, machine=machine, rates={"fp32": 5e13},
    )  # fmt: skip
    return Bench(
        model=name, data=data, options={"model": name}, command=f"brimful bench '{name}' --rows guide", workload=work,
        steps=Steps(warm_up=24, repeats=5, block=20), rows=tuple(rows), recommended=best.key,
    )  # fmt: skip
