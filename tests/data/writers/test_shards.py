"""Results that survive: the same bytes whatever happened to the run, one run at a time, nothing of others touched."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brimful.core.classification import Counts
from brimful.core.errors import DataError, DiskFullError, OutputError
from brimful.core.manifest import Manifest, changes, plain_identity, read_manifest
from brimful.data.readers.sources import read_rows
from brimful.data.writers import row_files
from brimful.data.writers.shards import LineOutput, ShardedOutput
from outputs import RECORD, SCHEMA, contents, counts_of, window, windows

TESTS = Path(__file__).parents[2]
NAMES = ["results.parquet", "results.csv", "results.tsv.gz", "results.jsonl", "results.jsonl.zst", "results"]
SIZES = [40, 40, 40, 25]
ROWS = sum(SIZES)


def opened(path: Path, *, resume: bool = False, shard_rows: int = 80, **options: Any) -> ShardedOutput:
    return ShardedOutput(path, identity={"--max-length": 128}, resume=resume, shard_rows=shard_rows, **options)


def write_all(output: ShardedOutput, tables: Iterable[pa.Table]) -> None:
    """The windows that are not there yet."""
    row, done = 0, output.rows_done
    for table in tables:
        if row >= done:
            output.write(table, counts_of(table))
        row += table.num_rows


def run(path: Path, tables: Iterable[pa.Table], **options: Any) -> dict[str, bytes]:
    with opened(path, **options) as output:
        write_all(output, tables)
        output.finish(RECORD)
    return contents(path)


class Stop(Exception):  # noqa: N818
    """Something that goes wrong elsewhere."""


def interrupt(path: Path, tables: Iterable[pa.Table], **options: Any) -> None:
    """A run that is left before its end, as Ctrl-C leaves it."""
    with contextlib.suppress(Stop), opened(path, **options) as output:
        write_all(output, tables)
        raise Stop


def manifest_of(path: Path) -> Manifest:
    manifest = read_manifest(path)
    assert manifest is not None
    return manifest


# --- what is there in the end -----------------------------------------------------------------------------------------


def test_a_file(tmp_path: Path) -> None:
    with opened(tmp_path / "results.parquet") as output:
        write_all(output, windows(SIZES))
        assert not (tmp_path / "results.parquet").exists()
        final = output.finish(RECORD)
    assert final == (tmp_path / "results.parquet", tmp_path / "results.parquet.manifest.json")
    assert sorted(tmp_path.iterdir()) == sorted(final)
    assert pq.read_table(final[0]).to_pylist() == pa.concat_tables(windows(SIZES)).to_pylist()
    manifest = manifest_of(final[1])
    assert (manifest.status, manifest.record, manifest.num_rows) == ("finished", RECORD, ROWS)
    assert manifest.counts == sum(map(counts_of, windows(SIZES)), Counts())
    assert [(column.name, column.type) for column in manifest.columns][:2] == [
        ("id", "int64"),
        ("text", "large_string"),
    ]
    assert manifest.shards[0].num_bytes == final[0].stat().st_size


@pytest.mark.parametrize(("limit", "value"), [("_GROUP_ROWS", 70), ("_GROUP_BYTES", 5000)])
def test_row_groups(limit: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold several windows, and the same ones in a file that was made once more from a log."""
    monkeypatch.setattr(row_files, limit, value)
    undisturbed = run(tmp_path / "one" / "results.parquet", windows(SIZES))
    interrupt(tmp_path / "two" / "results.parquet", windows(SIZES)[:1])
    interrupt(tmp_path / "two" / "results.parquet", windows(SIZES)[:3], resume=True)
    assert run(tmp_path / "two" / "results.parquet", windows(SIZES), resume=True) == undisturbed
    metadata = pq.ParquetFile(tmp_path / "one" / "results.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [80, 65]
    assert metadata.row_group(1).column(0).statistics.min == 80


def test_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path / "results") as output:
        write_all(output, windows(SIZES))
        early = read_rows(str(tmp_path / "results"))  # others may read while it grows
        final = output.finish(RECORD)
    assert early.num_rows == 80
    assert [path.name for path in final] == ["part-00000.parquet", "part-00001.parquet", "_manifest.json"]
    assert sorted((tmp_path / "results").iterdir()) == sorted(final)
    expected = pa.concat_tables(windows(SIZES)).to_pylist()
    assert pq.read_table(tmp_path / "results").to_pylist() == expected
    assert read_rows(str(tmp_path / "results")).num_rows == ROWS
    shards = manifest_of(final[-1]).shards
    assert [(shard.file, shard.first_row, shard.num_rows) for shard in shards] == [
        ("part-00000.parquet", 0, 80),
        ("part-00001.parquet", 80, 65),
    ]
    assert [shard.counts for shard in shards] == [
        sum(map(counts_of, half), Counts()) for half in (windows(SIZES)[:2], windows(SIZES)[2:])
    ]


def test_the_last_shard_is_not_an_empty_one(tmp_path: Path) -> None:
    found = run(tmp_path / "results", [*windows([40, 40]), window(80, 0)])
    assert sorted(found) == ["results/_manifest.json", "results/part-00000.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name: str, tmp_path: Path) -> None:
    found = run(tmp_path / name, [window(0, 0)])
    assert len(found) == 2
    if "parquet" in name or name == "results":
        table = pq.read_table(tmp_path / name)
        assert (table.num_rows, table.schema) == (0, SCHEMA)
    with opened(tmp_path / name, resume=True) as output:
        assert output.finished == RECORD


def test_a_file_with_its_manifest_beside_it_is_one_file_of_data(tmp_path: Path) -> None:
    run(tmp_path / "results.jsonl", windows(SIZES))
    assert read_rows(str(tmp_path)).num_rows == read_rows(f"{tmp_path}/*").num_rows == ROWS


def test_what_else_a_schema_says_is_not_kept(tmp_path: Path) -> None:
    table = window(0, 3).replace_schema_metadata({"pandas": "an index of other rows"})
    run(tmp_path / "results.parquet", [table])
    assert set(pq.read_schema(tmp_path / "results.parquet").metadata or {}) == set()


def test_columns_do_not_change(tmp_path: Path) -> None:
    with opened(tmp_path / "results.csv") as output:
        output.write(window(0, 3), counts_of(window(0, 3)))
        with pytest.raises(AssertionError, match="columns changed"):
            output.write(window(3, 3).drop_columns(["raw"]), Counts(num_rows=3))


# --- stopped, and gone on with ----------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    stops=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=3),
    shard_rows=st.integers(1, 100),
    commit_s=st.sampled_from([0.0, float("inf")]),
)
def test_the_same_bytes_wherever_it_was_stopped(
    name: str, sizes: list[int], stops: list[tuple[int, bool]], shard_rows: int, commit_s: float
) -> None:
    """stops: windows that a run gets further, and whether it can still say goodbye."""
    with tempfile.TemporaryDirectory() as folder:
        expected = run(Path(folder) / "alone" / name, windows(sizes), shard_rows=shard_rows)
        path, options = Path(folder) / "run" / name, {"shard_rows": shard_rows, "commit_s": commit_s}
        last = 0
        for number, (further, goodbye) in enumerate(stops):
            last = min(last + further, len(sizes))
            copy = Path(folder) / f"killed-{number}" / name
            with contextlib.suppress(Stop), opened(path, resume=bool(number), **options) as output:
                write_all(output, windows(sizes)[:last])
                shutil.copytree(path.parent, copy.parent)  # as a kill leaves it
                raise Stop
            if goodbye:
                with opened(path, resume=True, **options) as output:
                    assert output.rows_done == sum(sizes[:last])
            path = path if goodbye else copy
        with opened(path, resume=True, **options) as output:
            write_all(output, windows(sizes))
            assert output.counts.num_rows == sum(sizes)
            output.finish(RECORD)
        assert contents(path) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_finished_run_is_finished(name: str, tmp_path: Path) -> None:
    before = run(tmp_path / name, windows(SIZES))
    with opened(tmp_path / name, resume=True) as output:
        assert (output.finished, output.rows_done, output.lost) == (RECORD, ROWS, None)
    assert contents(tmp_path / name) == before
    assert not (tmp_path / f"{name}.parts").exists()


def test_a_manifest_without_a_count_that_came_later(tmp_path: Path) -> None:
    interrupt(tmp_path / "results", windows(SIZES))
    place = tmp_path / "results" / "_manifest.json"
    kept = place.read_text("utf-8")
    before = re.sub(r'\n +"num_unlabelled": 0,', "", kept)
    assert before != kept
    place.write_text(before, "utf-8")
    with opened(tmp_path / "results", resume=True) as output:
        assert (output.rows_done, output.counts.num_unlabelled) == (ROWS, 0)


@pytest.mark.parametrize("name", ["results.parquet", "results"])
def test_resuming_nothing_begins(name: str, tmp_path: Path) -> None:
    assert run(tmp_path / "a" / name, windows(SIZES), resume=True) == run(tmp_path / "b" / name, windows(SIZES))


@pytest.mark.parametrize("name", ["results.parquet", "results", "deep/er/results"])
def test_a_run_that_answered_nothing_leaves_nothing(name: str, tmp_path: Path) -> None:
    interrupt(tmp_path / name, [window(0, 0)])
    assert [path for path in tmp_path.rglob("*") if "results" in path.name] == []
    (tmp_path / "results").mkdir()
    interrupt(tmp_path / "results", [])
    assert list((tmp_path / "results").iterdir()) == []


@pytest.mark.parametrize(("name", "hint"), [("results.parquet", "results.parquet.parts"), ("results", "results")])
def test_an_unfinished_run_is_not_written_over(name: str, hint: str, tmp_path: Path) -> None:
    interrupt(tmp_path / name, windows(SIZES)[:3])
    before = contents(tmp_path / name)
    with pytest.raises(OutputError, match="did not finish: 120 rows are done") as caught, opened(tmp_path / name):
        pass
    assert caught.value.hint == f"go on with --resume, or remove {tmp_path / hint}"
    assert contents(tmp_path / name) == before


def test_a_finished_file_is_replaced_at_the_end_and_a_finished_folder_is_not(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    before = run(path, windows([3]))
    interrupt(path, windows(SIZES)[:2])
    assert contents(path).items() >= before.items()
    after = run(path, windows(SIZES), resume=True)
    assert after == run(tmp_path / "new" / "results.jsonl", windows(SIZES))
    run(tmp_path / "results", windows([3]))
    with pytest.raises(OutputError, match="already holds results"), opened(tmp_path / "results"):
        pass


@pytest.mark.parametrize("name", ["results.csv", "results"])
def test_what_differs_is_named(name: str, tmp_path: Path) -> None:
    identity = {"--max-length": 128, "the input": "a" * 64, "--labels": None}
    other = {"--max-length": 256, "the input": "b" * 64, "--labels": "x,y"}
    with ShardedOutput(tmp_path / name, identity=identity, resume=False, shard_rows=10) as output:
        write_all(output, windows(SIZES))
        before = contents(tmp_path / name)
    for finish in (False, True):
        with (
            pytest.raises(OutputError) as caught,
            ShardedOutput(tmp_path / name, identity=other, resume=True, shard_rows=10),
        ):
            pass
        assert str(caught.value) == (
            f"{tmp_path / name} cannot be resumed: --max-length was 128, is 256; the input has changed; "
            "--labels was not given, is x,y"
        )
        with ShardedOutput(tmp_path / name, identity=identity, resume=True, shard_rows=10) as output:
            if not finish:
                output.finish(RECORD)
    assert before


def test_identities_are_compared_as_json() -> None:
    assert changes(plain_identity({"a": (1, 2), "b": {"c": None}}), {"a": [1, 2], "b": {"c": None}}) == []
    assert changes({"a": 1}, {"b": "x\x1b"}) == ["b was not given, is x\\x1b", "a was 1, is not given"]
    assert changes({"the model's files": "a" * 64}, {"the model's files": "b" * 64}) == [
        "the model's files have changed"
    ]


def test_another_size_of_shards_is_another_folder(tmp_path: Path) -> None:
    interrupt(tmp_path / "results", windows(SIZES), shard_rows=80)
    with (
        pytest.raises(OutputError, match="--shard-rows was 80, is 90"),
        opened(tmp_path / "results", resume=True, shard_rows=90),
    ):
        pass
    interrupt(tmp_path / "results.csv", windows(SIZES)[:2], shard_rows=80)
    run(tmp_path / "results.csv", windows(SIZES), resume=True, shard_rows=90)


def test_other_columns_than_before(tmp_path: Path) -> None:
    interrupt(tmp_path / "results", windows(SIZES)[:3])
    table = window(120, 25).drop_columns(["raw"])
    with (
        pytest.raises(OutputError, match=r"its columns were id: int64, .*raw: binary, and are id"),
        opened(tmp_path / "results", resume=True) as output,
    ):
        output.write(table, counts_of(table))
    with opened(tmp_path / "results", resume=True) as output:
        assert output.rows_done == 120


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x\n")


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: os.truncate(path, 99)])
@pytest.mark.parametrize(
    ("file", "first"),
    [("part-00000.parquet", 0), ("part-00001.parquet", 80), (".wal-000000000160.arrow", 160)],
)
def test_damaged_shards_are_made_again(file: str, first: int, damage: Callable[[Path], object], tmp_path: Path) -> None:
    sizes = [40, 40, 40, 40, 20, 60]
    interrupt(tmp_path / "run" / "results", windows(sizes)[:5])
    damage(tmp_path / "run" / "results" / file)
    with opened(tmp_path / "run" / "results", resume=True) as output:
        assert output.lost == (f"{file} is missing or damaged: row {first + 1} and those after it are done again")
        assert output.rows_done == first
        write_all(output, windows(sizes))
        output.finish(RECORD)
    assert contents(tmp_path / "run" / "results") == run(tmp_path / "alone" / "results", windows(sizes))


@pytest.mark.parametrize("damage", [flip, append])
def test_a_finished_folder_with_damage_is_mended(damage: Callable[[Path], object], tmp_path: Path) -> None:
    before = run(tmp_path / "results", windows(SIZES))
    damage(tmp_path / "results" / "part-00001.parquet")
    with opened(tmp_path / "results", resume=True) as output:
        assert (output.finished, output.rows_done) == (None, 80)
        write_all(output, windows(SIZES))
        output.finish(RECORD)
    assert contents(tmp_path / "results") == before


def test_only_logs_may_have_more_behind_what_the_manifest_names(tmp_path: Path) -> None:
    interrupt(tmp_path / "run" / "results", windows(SIZES)[:3])
    append(tmp_path / "run" / "results" / ".wal-000000000080.arrow")
    with opened(tmp_path / "run" / "results", resume=True) as output:
        assert (output.lost, output.rows_done) == (None, 120)
        write_all(output, windows(SIZES))
        output.finish(RECORD)
    assert contents(tmp_path / "run" / "results") == run(tmp_path / "alone" / "results", windows(SIZES))
    interrupt(tmp_path / "torn" / "results", windows(SIZES)[:3])
    append(tmp_path / "torn" / "results" / "part-00000.parquet")
    with opened(tmp_path / "torn" / "results", resume=True) as output:
        assert output.lost == "part-00000.parquet is missing or damaged: row 1 and those after it are done again"


@pytest.mark.parametrize("damage", [flip, append])
@pytest.mark.parametrize("name", ["results.csv", "results.parquet"])
def test_a_finished_file_that_was_changed_or_removed(
    name: str, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / name
    before = run(path, windows(SIZES))
    damage(path)
    with pytest.raises(OutputError, match="is finished, and has been changed since"), opened(path, resume=True):
        pass
    path.unlink()
    with opened(path, resume=True) as output:
        assert output.lost == f"{name} is missing: all rows are done again"
        write_all(output, windows(SIZES))
        output.finish(RECORD)
    assert contents(path) == before


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"status": "running", "identity": {}, "shards": [3]}', "\x00"])
def test_a_manifest_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "_manifest.json").write_text(text, "utf-8")
    with pytest.raises(OutputError, match="is not the manifest"), opened(tmp_path / "results", resume=True):
        pass
    (tmp_path / "results" / "_manifest.json").write_text('{"status": "running", "identity": {}, "schema": 1}', "utf-8")
    with pytest.raises(OutputError, match="has schema 1, and this version"), opened(tmp_path / "results"):
        pass


# --- others -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["results.parquet", "results"])
def test_one_at_a_time(name: str, tmp_path: Path) -> None:
    with opened(tmp_path / name, commit_s=0) as first:
        write_all(first, windows(SIZES)[:2])
        for resume in (False, True):
            with pytest.raises(OutputError, match="another process is writing into") as caught:
                opened(tmp_path / name, resume=resume).__enter__()
            assert str(caught.value).endswith(f"/{name}")
        write_all(first, windows(SIZES))
        first.finish(RECORD)
    assert contents(tmp_path / name) == run(tmp_path / "alone" / name, windows(SIZES))


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "part-00000.parquet").write_text("theirs", "utf-8")
    for resume in (False, True):
        with pytest.raises(OutputError, match=r"is not empty: it holds part-00000\.parquet"):
            opened(folder, resume=resume).__enter__()
    assert contents(folder) == {"results/part-00000.parquet": b"theirs"}


def test_files_of_others_beside_ours_stay(tmp_path: Path) -> None:
    interrupt(tmp_path / "results", windows(SIZES)[:1])
    (tmp_path / "results" / "notes.txt").write_text("mine", "utf-8")
    found = run(tmp_path / "results", windows(SIZES), resume=True)
    assert found["results/notes.txt"] == b"mine"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    for name in ("file", "file/results.csv"):
        with pytest.raises(OutputError, match="cannot write"):
            opened(tmp_path / name).__enter__()


def test_a_column_that_parquet_does_not_have(tmp_path: Path) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    table = pa.table({"text": ["a"], "mixed": union})
    with (
        pytest.raises(OutputError, match=r"column 'mixed' cannot be written to a \.parquet file") as caught,
        opened(tmp_path / "results") as output,
    ):
        output.write(table, Counts(num_rows=1))
    assert "jsonl" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []
    run_one = tmp_path / "results.jsonl"
    with opened(run_one) as output:
        output.write(table, Counts(num_rows=1))
        output.finish(RECORD)
    assert json.loads(run_one.read_text("utf-8")) == {"text": "a", "mixed": 1}


# --- a full disk, and kills -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["results.parquet", "results.jsonl", "results"])
def test_a_full_disk_keeps_what_is_on_it(name: str, disk: Callable[[str], Path], tmp_path: Path) -> None:
    sizes = [50] * 40
    folder = disk("256k")
    with pytest.raises(DiskFullError, match="No space left on device") as caught:
        run(folder / name, noisy(sizes), commit_s=0)
    assert "--resume" in (caught.value.hint or "")
    subprocess.run(["mount", "-o", "remount,size=16m", str(folder)], check=True)
    with opened(folder / name, resume=True) as output:
        assert 0 < output.rows_done < sum(sizes)
        write_all(output, noisy(sizes))
        output.finish(RECORD)
    assert contents(folder / name) == run(tmp_path / "alone" / name, noisy(sizes))


def noisy(sizes: list[int]) -> list[pa.Table]:
    """Windows that cannot be made smaller: 10 kB each, about."""
    draw = random.Random(0)
    return [pa.table({"label": ["good"] * size, "noise": [draw.randbytes(200) for _ in range(size)]}) for size in sizes]


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "how"), [("results.parquet", ""), ("results.csv.gz", "tear"), ("results", ""), ("results", "again")]
)
def test_kills(name: str, how: str) -> None:
    assert kills(name, 83, how) >= 3


@pytest.mark.faults
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["", "tear", "again"])
def test_kills_everywhere(name: str, how: str) -> None:
    print(f"{name} {how}: {kills(name, 3, how)} kills, each resumed: the bytes of the run left alone")


def kills(name: str, step: int, how: str) -> int:
    """See output_kills.py."""
    words = [
        sys.executable,
        str(TESTS / "data" / "writers" / "output_kills.py"),
        name,
        str(step),
        *([how] if how else []),
    ]
    paths = os.pathsep.join([str(TESTS), str(TESTS / "engine" / "training"), *sys.path])
    ended = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False, timeout=3000
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["wrong"] == [], ended.stderr
    return int(found["kills"])


# --- stdout -----------------------------------------------------------------------------------------------------------


def test_lines() -> None:
    stream = io.StringIO()
    with LineOutput(stream) as output:
        for table in windows(SIZES):
            output.write(table, counts_of(table))
            assert len(stream.getvalue().splitlines()) == output.rows_done
        assert output.finish(RECORD) == ()
    assert [json.loads(line)["id"] for line in stream.getvalue().splitlines()] == list(range(ROWS))
    assert output.counts == sum(map(counts_of, windows(SIZES)), Counts())


def test_errors_elsewhere_are_not_changed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 3 is bad"), opened(tmp_path / "results.csv"):
        raise DataError("row 3 is bad")
