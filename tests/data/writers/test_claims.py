"""Claims on pieces of work: who may have one when, and whose result counts. Leases are endless or over at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from brimful.core.errors import OutputError
from brimful.core.manifest import MANIFEST, read_manifest
from brimful.data.writers.claimed_output import ClaimedOutput
from brimful.data.writers.claims import CLAIMS, Claim, Claims
from outputs import RECORD, counts_of, window

ENDLESS, OVER = 1e9, 1e-9


def claims_in(folder: Path, lease_s: float = ENDLESS, num_pieces: int = 2) -> Claims:
    claims = Claims(folder, num_pieces, lease_s=lease_s)
    assert claims.enter({"asked": "this"}) == {"asked": "this"}
    return claims


def write_into(claim: Claim, text: str) -> None:
    claim.work.mkdir()
    (claim.work / "result").write_text(text)


def taken(claims: Claims) -> Claim:
    claim = claims.take()
    assert claim is not None
    return claim


def test_each_piece_has_one_owner(tmp_path: Path) -> None:
    first, second = claims_in(tmp_path), claims_in(tmp_path)
    owners = [first.take(), second.take(), first.take(), second.take()]
    assert [None if each is None else (each.number, each.generation) for each in owners] == [(0, 1), (1, 1), None, None]
    assert not Claim(first.folder, 0, 1, ENDLESS).create()  # by one who had looked before there was one
    said = json.loads((tmp_path / CLAIMS / "00000.1.claim").read_text())
    assert set(said) == {"host", "pid", "token", "beat"}


def test_identities_that_differ_are_told(tmp_path: Path) -> None:
    """Whoever was first decides, and the others see it."""
    claims_in(tmp_path)
    assert Claims(tmp_path, 2, lease_s=ENDLESS).enter({"asked": "that"}) == {"asked": "this"}
    assert not [each for each in tmp_path.iterdir() if each.name != CLAIMS]


def test_a_claim_without_signs_of_life_is_followed(tmp_path: Path) -> None:
    """Not before a whole lease on the watcher's clock, and not while its file changes between two looks."""
    owner, watcher, patient = claims_in(tmp_path), claims_in(tmp_path, OVER), claims_in(tmp_path, ENDLESS)
    first, second = taken(owner), taken(owner)
    assert watcher.take() is None  # the first look
    for claim in (first, second):
        claim._beat += 1
        (tmp_path / CLAIMS / f"{claim.number:05d}.1.claim").write_bytes(claim._life())
    assert patient.take() is None
    assert watcher.take() is None  # both have changed since
    after = taken(watcher)
    assert (after.number, after.generation) == (0, 2)
    assert first.look()
    assert not second.look()
    assert patient.take() is None


def test_the_first_to_end_a_piece_has_its_result(tmp_path: Path) -> None:
    owner, watcher = claims_in(tmp_path, num_pieces=1), claims_in(tmp_path, OVER, num_pieces=1)
    stopped = taken(owner)
    write_into(stopped, "of the one that was stopped")
    assert watcher.take() is None
    after = taken(watcher)
    write_into(after, "of the one after it")
    assert after.publish()
    assert not stopped.publish()
    assert stopped.lost
    assert (owner.result(0) / "result").read_text() == "of the one after it"
    assert owner.take() is None


def test_a_stopped_owner_may_still_be_the_first(tmp_path: Path) -> None:
    """Its result is as whole as that of the one after it would have been."""
    owner, watcher = claims_in(tmp_path, num_pieces=1), claims_in(tmp_path, OVER, num_pieces=1)
    stopped = taken(owner)
    watcher.take()
    after = taken(watcher)
    for claim in (stopped, after):
        write_into(claim, str(claim.generation))
    assert stopped.publish()
    assert not after.publish()
    assert (owner.result(0) / "result").read_text() == "1"


def test_an_owner_that_wakes_up_after_all_is_done_changes_nothing(tmp_path: Path) -> None:
    claims = claims_in(tmp_path)
    stopped = taken(claims)
    write_into(stopped, "late")
    claims.remove()
    assert not list(tmp_path.iterdir())
    assert not stopped.publish()
    stopped.fail("no", None)
    stopped._ended.set()
    with stopped.working():
        pass
    with pytest.raises(FileNotFoundError):
        claims.take()
    assert not list(tmp_path.iterdir())


def test_a_piece_that_was_left_is_free_at_once(tmp_path: Path) -> None:
    claims = claims_in(tmp_path, num_pieces=1)
    with pytest.raises(KeyError), taken(claims).working():
        raise KeyError
    assert taken(claims).generation == 2


def test_a_piece_that_cannot_be_done_is_tried_once_by_whoever_comes_later(tmp_path: Path) -> None:
    claims = claims_in(tmp_path, OVER, num_pieces=1)
    with (claim := taken(claims)).working():
        claim.fail("is damaged", "mend it")
    assert [claims.take() for _ in range(3)] == [None] * 3
    (failure,) = claims.failures()
    assert (failure.number, failure.message, failure.hint) == (0, "is damaged", "mend it")
    later, latest = claims_in(tmp_path, OVER, num_pieces=1), claims_in(tmp_path, num_pieces=1)
    assert taken(later).generation == 2
    assert latest.take() is None
    assert not claims.failures()


# --- results of pieces ------------------------------------------------------------------------------------------------

ROWS = (5, 0, 7)
PIECES = ("first", "second", "third")
GIVEN: Any = {"pieces": PIECES, "names": [f"{name}.csv" for name in PIECES], "shard_rows": 2}


def output_in(path: Path, lease_s: float = ENDLESS, **own: str) -> ClaimedOutput:
    output = ClaimedOutput(path, identity={"asked": "this"}, own=own, **GIVEN, lease_s=lease_s)
    assert output.enter() is None
    return output


def do(output: ClaimedOutput, claim: Claim, rows: int | None = None) -> int:
    """Write a piece's rows, two at a time; return those that were there already. rows: to end unfinished after."""
    number = claim.number
    with output.open(claim) as kept:
        done = kept.rows_done
        wanted = ROWS[number] if rows is None else rows
        for row in range(done, wanted, 2):
            table = window(sum(ROWS[:number]) + row, min(2, wanted - row))
            kept.write(table, counts_of(table))
        if not wanted:
            kept.write(window(0, 0), counts_of(window(0, 0)))
        if rows is None:
            kept.finish(RECORD)
    return done


def complete(output: ClaimedOutput) -> list[int]:
    seen = []
    output.complete(lambda records: seen.extend([len(records)]) or records[0])  # type: ignore[func-returns-value]
    return seen


def whole(path: Path) -> dict[str, str]:
    return {each.name: each.read_bytes().hex() for each in sorted(path.iterdir()) if each.name != MANIFEST}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Results of one process that nothing happened to."""
    path = tmp_path_factory.mktemp("alone") / "results"
    output = output_in(path)
    while (claim := output.claims.take()) is not None:
        assert do(output, claim) == 0
        assert output.publish(claim)
    assert complete(output) == [len(ROWS)]
    manifest = read_manifest(path / MANIFEST)
    assert manifest is not None
    assert [(each.file, each.input, each.first_row, each.num_rows) for each in manifest.shards] == [
        ("part-00000.parquet", "first.csv", 0, 5),
        ("part-00001.parquet", "second.csv", 5, 0),
        ("part-00002.parquet", "third.csv", 5, 7),
    ]  # fmt: skip
    return whole(path)


def test_work_of_an_owner_before_is_gone_on_with(tmp_path: Path, alone: dict[str, str]) -> None:
    """Committed rows are copied; whatever that owner writes afterwards is not seen. On another device, all anew."""
    path = tmp_path / "results"
    owner, watcher = output_in(path, device="a"), output_in(path, OVER, device="a")
    stopped = taken(owner.claims)
    assert do(owner, stopped, rows=4) == 0
    watcher.claims.take()
    assert watcher.claims.take() is not None  # piece 1, without rows
    after = Claim(watcher.claims.folder, 0, 2, ENDLESS)
    assert after.create()
    with watcher.open(after) as kept:
        assert kept.rows_done == 4
    other = Claim(watcher.claims.folder, 0, 3, ENDLESS)
    assert other.create()
    with output_in(path, device="b").open(other) as kept:
        assert kept.rows_done == 0
    last = Claim(watcher.claims.folder, 0, 4, ENDLESS)
    assert last.create()
    assert do(watcher, last) == 4
    assert watcher.publish(last)
    assert not owner.publish(stopped)
    assert (path / "part-00000.parquet").read_bytes().hex() == alone["part-00000.parquet"]


def test_work_that_was_damaged_is_done_again(tmp_path: Path, alone: dict[str, str]) -> None:
    output = output_in(tmp_path / "results")
    claim = taken(output.claims)
    assert do(output, claim, rows=4) == 0
    (parts,) = claim.work.iterdir()
    log = sorted(parts.glob(".wal-*"))[1]
    log.write_bytes(log.read_bytes()[:-9] + b"x" * 9)
    after = Claim(output.claims.folder, 0, 2, ENDLESS)
    assert after.create()
    assert do(output, after) == 2
    assert output.publish(after)
    assert (tmp_path / "results" / "part-00000.parquet").read_bytes().hex() == alone["part-00000.parquet"]


def test_finished_work_of_a_killed_owner_is_published_by_the_next(tmp_path: Path, alone: dict[str, str]) -> None:
    output = output_in(tmp_path / "results")
    do(output, taken(output.claims))
    after = Claim(output.claims.folder, 0, 2, ENDLESS)
    assert after.create()
    with output.open(after) as kept:
        assert kept.finished == RECORD
    assert output.publish(after)
    assert (tmp_path / "results" / "part-00000.parquet").read_bytes().hex() == alone["part-00000.parquet"]


def test_an_owner_that_wakes_up_after_all_is_removed_writes_nothing(tmp_path: Path) -> None:
    output = output_in(tmp_path / "results")
    stopped = taken(output.claims)
    output.claims.remove()
    with pytest.raises(FileNotFoundError):
        output.open(stopped)
    assert not list((tmp_path / "results").iterdir())


@pytest.mark.parametrize("left_off", ["before a move", "before the manifest", "before claims are removed"])
def test_whoever_comes_later_completes(left_off: str, tmp_path: Path, alone: dict[str, str]) -> None:
    """A process is killed while it completes; another one that was stopped wakes up in the midst of it."""
    path = tmp_path / "results"
    output, stopped = output_in(path), output_in(path)
    while (claim := output.claims.take()) is not None:
        do(output, claim)
        assert claim.publish()
        if left_off != "before a move":
            output._place(claim.number)
    if left_off == "before claims are removed":
        shutil.copytree(path / CLAIMS, tmp_path / "claims")
        complete(output)
        shutil.copytree(tmp_path / "claims", path / CLAIMS)
        later = ClaimedOutput(path, identity=output._of_piece, own={}, **GIVEN, lease_s=ENDLESS)
        assert later.enter() is not None
    else:
        later = output_in(path)
        assert later.claims.take() is None
        assert complete(later) == [3]
    assert whole(path) == alone
    assert stopped.complete(lambda records: records[1]) == RECORD  # the record that is there
    assert whole(path) == alone


def test_what_was_lost_since_is_told(tmp_path: Path) -> None:
    path = tmp_path / "results"
    output = output_in(path)
    while (claim := output.claims.take()) is not None:
        do(output, claim)
        output.publish(claim)
    (path / "part-00002.parquet").unlink()
    with pytest.raises(OutputError, match=r"part-00002\.parquet is missing"):
        complete(output)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(OutputError, match="is not empty: it holds notes"):
        output_in(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["notes"]


def test_a_piece_that_has_changed_since_is_told(tmp_path: Path) -> None:
    path = tmp_path / "results"
    output = output_in(path)
    while (claim := output.claims.take()) is not None:
        do(output, claim)
        output.publish(claim)
    other = ("first", "mended", "third")
    later = ClaimedOutput(path, identity={"asked": "this"}, own={}, **GIVEN | {"pieces": other}, lease_s=ENDLESS)
    assert later.enter() is None
    with pytest.raises(OutputError, match=r"part-00001\.parquet has changed since"):
        complete(later)
    assert not (path / MANIFEST).exists()
    complete(output)
    with pytest.raises(OutputError, match="holds the results of another run: the input's files have changed"):
        later.enter()
