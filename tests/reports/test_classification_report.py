"""A classification as text and as a page: the same facts in both, and nothing that is not known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import brimful
from brimful.core.classification import LENGTH_ENDS, Classification, Counts, GpuShare, Stage
from brimful.core.errors import DataError
from brimful.core.manifest import MANIFEST, MANIFEST_SUFFIX, Manifest
from brimful.core.records import LabelSpace, Machine, PeakMemory, Recipe, to_json
from brimful.reports.classification_page import classification_page
from brimful.reports.classification_text import classification_text
from classifications import ANSWER_EQUIVALENCE, RECORD, changed
from pages import Page

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&$x$\x1b[2J\u202e"
MANY = tuple(f"label {i}" for i in range(1000))


def shown(record: Classification) -> tuple[str, Page]:
    """Text and page, which must be whole in every case."""
    text, found = classification_text(record), Page(classification_page(record))
    found.check()
    assert not any(c in text for c in "\x1b\u202e\x00")
    assert found.record == json.loads(to_json(record))
    assert found.charts is not None
    return text, found


def both_say(record: Classification, *facts: str) -> None:
    text, found = shown(record)
    for fact in facts:
        assert fact in text
        assert fact in found.text


def test_the_facts() -> None:
    text, found = shown(RECORD)
    for fact in (
        "1,000,000 texts in 15.4 s on NVIDIA H200",
        "41.2 %",
        "1 (< 0.1 %) of 1,000,000 rows had no text, and has no answer",
        "34 (< 0.1 %) of 1,000,000 rows were longer",
        "Computing is the limit, as it should be",
        "24.1 on average, half of the texts have at most 32, 95 % have at most 64",
        "0.9 or more in 597,499 (59.7 %) of the texts, below 0.5 in 14,200 (1.4 %)",
        "512,345 (51.2 %)",
        "the other one a near-tie",
        "3.0 GiB allocated",
    ):
        assert fact in text
        assert fact in found.text
    for fact in ("bf16 · rounding", "equal on this model", RECORD.command, "torch 2.13.0", "--verify", "Passed"):
        assert fact in found.text
    assert "passed: bf16 against plain fp32 has the same label in 255 of 256 rows" in text
    assert "  computing           15.1 s        98.1 %  the limit" in text.splitlines()
    assert len(found.charts) == 4
    assert len(found.document) < 60_000


def test_each_gpu_of_several_has_its_share() -> None:
    first = GpuShare(number=0, num_windows=1200, busy_s=7.7, joined_s=0.0)
    text, _ = shown(changed(gpus=(first, GpuShare(number=2, num_windows=700, busy_s=4.2, joined_s=7.0))))
    assert "  GPU 0                7.7 s        50.0 %  1,200 windows" in text.splitlines()
    assert "  GPU 2                4.2 s        50.0 %  700 windows, from 7.0 s on" in text.splitlines()


def test_what_went_wrong_stands_before_the_figures() -> None:
    failed = dataclasses.replace(ANSWER_EQUIVALENCE, passed=False, num_flips=6, num_unexplained=2)
    text, found = shown(changed(fallback="the window was not honoured", equivalence=failed, counts={"num_errors": 12}))
    for fact in ("window was not honoured", "was not passed", "2 of the 6 others are no near-ties", "12 (< 0.1 %)"):
        assert text.index(fact) < text.index("Stages")
        assert found.text.index(fact) < found.text.index("Texts per second")
    assert "Equivalence check  NOT passed" in text


def test_rows_without_candidate_labels() -> None:
    both_say(
        changed(counts={"num_unlabelled": 2}), "2 (< 0.1 %) of 1,000,000 rows had no candidate labels, and have no"
    )
    both_say(changed(counts={"num_unlabelled": 1}), "rows had no candidate labels, and has no answer")


def test_a_clean_pass_has_no_warning() -> None:
    text, found = shown(changed(counts={"num_empty": 0, "num_truncated": 0}))
    assert "warning" not in text
    assert "Warning" not in found.text
    assert "None of them had to be cut" in found.text


def test_what_is_not_known_is_not_said() -> None:
    bare = Classification(
        model="m",
        data="-",
        output=None,
        command="brimful classify m -",
        options={},
        labels=RECORD.labels,
        recipe=Recipe(device="CPU", levers=()),
        machine=Machine(cpu=None, num_cores=None, memory_bytes=None),
        counts=Counts(num_rows=3),
    )
    text, found = shown(bare)
    for word in ("unknown", "None", "MFU", "texts/s", "Peak", "0.0"):
        assert word not in text
        assert word not in found.text
    assert "3 texts on CPU" in text
    assert "standard input" in text
    assert "not run" in text
    assert "Nothing was compared" in found.text
    assert found.charts == []


def test_no_rows() -> None:
    empty = changed(
        counts=Counts(), wall_s=0.0, texts_per_s=None, tokens_per_s=None, mfu=None, limit=None,
        stages=(Stage(name="read", busy_s=0.0),),
        equivalence=dataclasses.replace(ANSWER_EQUIVALENCE, num_rows=0, num_flips=0),
    )  # fmt: skip
    both_say(empty, "0 texts in 0.0 s")
    assert "The input had no rows." in shown(empty)[1].text


@pytest.mark.parametrize("count", [1, 2])
def test_one_text_and_one_label(count: int) -> None:
    one = LabelSpace(task="single_label", names=("only",), values={"only": 0})
    lengths = (count,) + (0,) * len(LENGTH_ENDS)
    counts = Counts(
        num_rows=count, num_tokens=3, labels={"only": count}, lengths=lengths, confidences=(0,) * 19 + (count,)
    )
    noun = "1 text in" if count == 1 else "2 texts in"
    both_say(changed(labels=one, counts=counts), noun, f"{count} (100.0 %)")


def test_a_regression_has_neither_labels_nor_confidences() -> None:
    space = LabelSpace(task="regression", names=("stars", "<b>"))
    text, found = shown(changed(labels=space, counts={"labels": {}, "confidences": ()}))
    assert "Labels" not in text
    assert "label" not in text.lower()
    assert "on 256 rows; off by at most 0.0031 of 0.02 (relative)" in text
    assert "a number: stars, <b>." in found.text
    assert "Same label" not in found.text
    assert "Largest relative difference" in found.text


def test_many_labels_are_cut_and_said() -> None:
    counts = {name: 2000 - i for i, name in enumerate(MANY)}
    space = LabelSpace(task="multi_label", names=(*MANY, "z1", "z2", "z3", "z4", "z5", "z6"), values={})
    text, found = shown(changed(labels=space, counts={"labels": counts, "num_rows": 100_000}))
    assert f"980 more labels, given {sum(counts.values()) - sum(range(1981, 2001)):,} times" in text
    assert f"970 more labels, given {sum(counts.values()) - sum(range(1971, 2001)):,} times" in found.text
    assert "Never given: z1, z2, z3, z4, z5 and 1 more." in text
    assert "Never given: z1, z2, z3, z4, z5 and 1 more." in found.text
    assert "a text can have several" in found.text
    assert "same labels in" in text
    assert len(found.document) < 300_000


def test_long_names_are_cut_in_the_chart_and_whole_in_the_numbers() -> None:
    long = "a name that is long " * 10
    text, found = shown(changed(counts={"labels": {long: 7, "标签名称在这里很长很长很长很长很长很长很长": 5, "": 3}}))
    assert long.strip() in found.text
    assert "a name that is lo…" in found.text
    assert "(empty)" in text
    rows = [line for line in text.splitlines() if line.endswith(("7 (< 0.1 %)", "5 (< 0.1 %)"))]
    assert len(rows) == 2


def test_hostile_text_everywhere() -> None:
    lever = dataclasses.replace(RECORD.recipe.levers[0], value=HOSTILE, reason=HOSTILE)
    record = dataclasses.replace(
        changed(counts={"labels": {HOSTILE: 3}}),
        model=HOSTILE,
        data=HOSTILE,
        output=HOSTILE,
        command=HOSTILE,
        fallback=HOSTILE,
        options={"labels": HOSTILE, HOSTILE: None},
        labels=LabelSpace(task="single_label", names=(HOSTILE, HOSTILE + "2")),
        recipe=Recipe(device=HOSTILE, levers=(lever,)),
        machine=Machine(cpu=HOSTILE, num_cores=1, memory_bytes=1, versions={HOSTILE: HOSTILE}),
    )
    _, found = shown(record)
    assert "\x1b" not in found.document
    assert found.all("img") == []


def test_the_same_record_is_the_same_page() -> None:
    assert classification_page(RECORD) == classification_page(dataclasses.replace(RECORD))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("limit", "device", "said"),
    [
        ("read", "CPU", "Reading is the limit: a .gz is unpacked by one core"),
        ("tokenise", "NVIDIA H200", "and the GPU waits for it"),
        ("tokenise", "CPU", "Tokenising is the limit: use more cores"),
        ("compute", "CPU", "Faster: a GPU, shorter texts"),
        ("write", "CPU", "Parquet is written fastest"),
    ],
)
def test_each_limit_has_its_advice(limit: str, device: str, said: str) -> None:
    recipe = dataclasses.replace(RECORD.recipe, device=device)
    both_say(changed(limit=limit, recipe=recipe, data="a.csv.gz", output="b.csv"), said)


def test_stages_of_several_processes_can_be_busy_longer_than_the_pass() -> None:
    both_say(changed(stages=(Stage(name="tokenise", busy_s=30.8),)), "200.0 %")


def test_partly_known_memory() -> None:
    both_say(changed(peak_bytes=PeakMemory(allocated=1 << 30)), "1.0 GiB allocated")


def test_texts_longer_than_any_class() -> None:
    lengths = (0,) * len(LENGTH_ENDS) + (5,)
    text, found = shown(changed(counts={"lengths": lengths, "num_tokens": 50_000}))
    assert "10,000.0 on average" in text
    assert "at most" not in text.split("Texts\n")[1].split("\n")[0]
    assert "8,193 on" in found.text


@pytest.mark.sampled
@pytest.mark.parametrize("given", ["results", "results/_manifest.json", "labels.parquet"])
def test_the_page_of_results(given: str, tmp_path: Path) -> None:
    """It is made from their manifest, whether a folder or a file; one in their folder is passed over by its readers."""
    manifest = Manifest(status="finished", identity={}, record=RECORD)
    (tmp_path / "results").mkdir()
    (tmp_path / "labels.parquet").touch()
    for path in (tmp_path / "results" / MANIFEST, tmp_path / ("labels.parquet" + MANIFEST_SUFFIX)):
        path.write_text(to_json(manifest), "utf-8")
    page = brimful.report(tmp_path / given)
    assert page.read_text("utf-8") == classification_page(RECORD)
    assert page.name == ("_report.html" if given == "results" else "report.html")


def test_results_that_are_not_finished_have_no_page(tmp_path: Path) -> None:
    (tmp_path / "labels.parquet.parts").mkdir()
    running = to_json(Manifest(status="running", identity={}))
    (tmp_path / "labels.parquet.parts" / MANIFEST).write_text(running, "utf-8")
    with pytest.raises(DataError, match="the classification has not finished"):
        brimful.report(tmp_path / "labels.parquet")
