"""Passes shared by processes that a launcher has started: the bytes and metrics of one process, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brimful
from brimful.cli.commands import run
from brimful.core.errors import OptionError, RanksError
from brimful.core.place import Place
from brimful.engine.classification.request import Texts
from brimful.engine.classification.stopping import check_why
from brimful.hardware.pulse import Lost
from brimful.hardware.ranks import Ranks
from forked_ranks import Forked
from tiny_files import review, save_classifier

pytestmark = pytest.mark.xdist_group("rank windows")  # one process makes what they share

#: A window has 1 MiB of text on a CPU: 64 rows of these.
TEXT_BYTES, ROWS = 16 << 10, 500
OPTIONS = ["--device", "cpu", "--max-length", "16", "--num-workers", "0"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier, labelled rows, some of which cannot be read, and what one process makes of them."""
    folder = tmp_path_factory.mktemp("rank-windows")
    save_classifier(folder / "model", ["bad", "good"])
    rows = [{"id": i, "text": long_text(i), "label": ["bad", "good"][i % 2]} for i in range(ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=150)
    lines = [json.dumps(row) for row in rows]
    lines[333] = lines[333][:-9]
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    for name in ("rows.parquet", "rows.jsonl"):
        assert run(classify(folder, folder / f"one-{name}", name)) == 0
    return folder


def long_text(number: int) -> str | None:
    if number % 37 == 5:
        return None
    text = review(bool(number % 3), number)
    return text + " and so on" * ((TEXT_BYTES - len(text)) // 10)


def classify(home: Path, output: Path, name: str = "rows.parquet", *more: str) -> list[str]:
    return ["classify", str(home / "model"), str(home / name), "--output", str(output), *OPTIONS, *more]


def start(folder: Path, words: list[str], count: int = 2) -> Forked:
    return Forked(folder, count, lambda _: run(words))


def counts(output: Path) -> dict[str, Any]:
    manifest = json.loads(output.with_name(output.name + ".manifest.json").read_text("utf-8"))
    found: dict[str, Any] = manifest["record"]["counts"]
    return found


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_several_write_what_one_does(name: str, home: Path, tmp_path: Path) -> None:
    """Rows, their order, errors and counts; the first process alone speaks."""
    output = tmp_path / name
    forked = start(tmp_path / "logs", classify(home, output, name), 3)
    assert forked.results() == [0, 0, 0], forked.said(0)
    assert output.read_bytes() == (home / f"one-{name}").read_bytes()
    assert counts(output) == counts(home / f"one-{name}")
    assert "3 processes share the rows" in forked.said(0)
    assert "500 texts" in forked.said(0)
    assert forked.said(1).strip() == forked.said(2).strip() == ""


@pytest.mark.thorough
def test_candidate_labels_of_each_row(tmp_path: Path) -> None:
    """Windows of zero-shot, whose answers depend on more than their texts."""
    save_classifier(tmp_path / "model", ["contradiction", "neutral", "entailment"])
    rows = [{"text": long_text(i), "topics": ["sport", "art", "news"][: i % 4]} for i in range(140)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    asked = ("--labels", "column:topics", "--top-k", "0")
    assert run(classify(tmp_path, tmp_path / "one.parquet", "rows.parquet", *asked)) == 0
    forked = start(tmp_path / "logs", classify(tmp_path, tmp_path / "two.parquet", "rows.parquet", *asked))
    assert forked.results() == [0, 0], forked.said(0)
    assert (tmp_path / "two.parquet").read_bytes() == (tmp_path / "one.parquet").read_bytes()


@pytest.mark.slow
def test_metrics_are_those_of_one_process(home: Path, tmp_path: Path) -> None:
    def words(output: str) -> list[str]:
        given = [str(home / "model"), str(home / "rows.parquet"), "--output", str(tmp_path / output)]
        return ["evaluate", *given, *OPTIONS, "--json", "--report", str(tmp_path / f"{output}.html")]

    forked = start(tmp_path / "logs", words("two.csv"))
    assert forked.results() == [0, 0], forked.said(0)
    alone = Forked(tmp_path / "one", 1, lambda _: run(words("one.csv")))
    assert alone.results() == [0]
    two, one = (json.loads(each.said(0)[each.said(0).index("\n{") :]) for each in (forked, alone))
    for field in ("metrics", "intervals", "confusion", "mistakes", "num_rows", "left_out"):
        assert two.get(field) == one.get(field)
    assert (tmp_path / "two.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
    assert (tmp_path / "two.csv.html").exists()


def wait_for(found: Callable[[], Any]) -> None:
    until = time.monotonic() + 240  # against hanging: a busy machine takes its time
    while not found():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("struck", ["the leader is told to stop", "the other one is killed"])
def test_a_pass_that_ends_early_is_gone_on_with_by_any_number(struck: str, home: Path, tmp_path: Path) -> None:
    """Answers are kept; who is gone is named; three processes, or one, go on to the same bytes."""
    output, many = tmp_path / "rows.parquet", home / "many.parquet"
    if not many.exists():
        table = pq.read_table(home / "rows.parquet")
        pq.write_table(pa.concat_tables([table] * 6), many)
        assert run(classify(home, home / "one-many.parquet", "many.parquet")) == 0
    forked = start(tmp_path / "logs", classify(home, output, "many.parquet", "--shard-rows", "50"))
    wait_for(lambda: list((tmp_path / "rows.parquet.parts").glob(".wal-*")))
    stop = struck == "the leader is told to stop"
    os.kill(forked.pids[0 if stop else 1], signal.SIGTERM if stop else signal.SIGKILL)
    leader, other = forked.results()
    assert (leader, other) == ((143, 7) if stop else (7, None)), forked.said(0)
    assert ("stopped after" if stop else "error: process 1 of 2 (") in forked.said(0)
    assert not output.exists()
    count = 3 if stop else 1
    again = start(tmp_path / "again", classify(home, output, "many.parquet", "--shard-rows", "50", "--resume"), count)
    assert again.results() == [0] * count, again.said(0)
    assert "going on after" in again.said(0)
    assert output.read_bytes() == (home / "one-many.parquet").read_bytes()
    done = start(tmp_path / "done", classify(home, output, "many.parquet", "--resume"))
    assert done.results() == [0, 0]
    assert "nothing to do" in done.said(0)


def test_a_file_that_is_damaged_is_named_once(home: Path, tmp_path: Path) -> None:
    """Both processes meet it; the leader speaks of it, after the rows before are written."""
    whole = (home / "rows.parquet").read_bytes()
    table = pq.ParquetFile(home / "rows.parquet").metadata.row_group(3).column(1)
    at = table.data_page_offset
    (tmp_path / "rows.parquet").write_bytes(whole[:at] + b"\xff" * 64 + whole[at + 64 :])
    (tmp_path / "model").symlink_to(home / "model")
    forked = start(tmp_path / "logs", classify(tmp_path, tmp_path / "out.parquet"))
    assert forked.results()[0] == 2, forked.said(0)
    assert forked.said(0).count("error:") == 1
    assert "rows.parquet" in forked.said(0).split("error:")[1]
    assert forked.said(1).strip() == ""


def test_what_several_processes_cannot_share(home: Path, tmp_path: Path) -> None:
    def work(_: Place) -> list[str]:
        said = []
        for data, more in (("-", {"output": tmp_path / "a.csv"}), (["a text"], {"frame": "list"})):
            with pytest.raises(OptionError) as found:
                brimful.classify(home / "model", data, device="cpu", **more)
            said.append(str(found.value))
        with pytest.raises(OptionError, match="a launcher has started 2 processes"):
            brimful.classify(home / "model", home / "rows.parquet", tmp_path / "b.csv", gpus="2")
        return said

    def quick(place: Place) -> list[str]:
        return work(place)

    given = Forked(tmp_path / "logs", 2, quick).results()
    assert given[0][0] == "INPUT is -, and 2 processes are to read it"
    assert given[0][1] == "2 processes share the rows, and no output is named"


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("other", "codes", "said"),
    [
        (slice(None, None, -1), [2, 7], "error: process 1 reads other rows than process 0\n"),
        (slice(0, 60), [7, 2], "failed: there are fewer rows here than in process 0\n"),
    ],
)
def test_a_process_with_other_rows(other: slice, codes: list[int], said: str, home: Path, tmp_path: Path) -> None:
    """Their answers are written beside nobody's rows."""
    rows = pq.read_table(home / "rows.parquet").to_pylist()
    pq.write_table(pa.Table.from_pylist(rows[other]), home / "other.parquet")

    def work(place: Place) -> int:
        return run(classify(home, tmp_path / "out.parquet", "other.parquet" if place.rank else "rows.parquet"))

    forked = Forked(tmp_path / "logs", 2, work)
    assert forked.exit_codes() == codes
    assert said in forked.said(0)
    assert not (tmp_path / "out.parquet").exists()


def test_why_a_pass_was_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sends SIGTERM to all where one is gone; where a user did, nobody is."""

    class Watch:
        found: Lost | None = None

        def verdict(self, _: float) -> Lost | None:
            return self.found

    ranks, watch = Ranks(), Watch()
    monkeypatch.setattr(ranks, "watch", watch)
    monkeypatch.setattr("brimful.engine.classification.stopping.store_is_launchers", lambda: True)
    check_why(ranks)
    watch.found = Lost(rank=1, of=2, why="has ended", host="here", device="CPU", step=0, phase="evaluation")
    with pytest.raises(RanksError, match=r"^process 1 of 2 \(here, CPU\), at step 0, in phase evaluation: has ended"):
        check_why(ranks)


def test_every_text_counts_in_the_mark_of_a_window() -> None:
    texts = pa.array(["first", "a", None, "last"], pa.large_string())
    other, pairs = pa.array(["first", "b", None, "last"], pa.large_string()), texts.slice(0)
    mark = Texts(texts=texts).mark()
    assert mark == Texts(texts=pa.concat_arrays([texts, other]).slice(0, 4)).mark()
    moved = pa.array(["firsta", "", None, "last"], pa.large_string())
    found = [Texts(texts=other), Texts(texts=moved), Texts(texts=texts, pairs=pairs), Texts(texts=texts, pairs=other)]
    assert len({mark, *(each.mark() for each in found)}) == 5
