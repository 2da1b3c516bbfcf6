"""Windows of texts through threads and processes: the ids of one tokenizer, in order, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import trained_tokenizers
from brimful.core.errors import DataError, OptionError
from brimful.data.tokens import token_stream
from brimful.data.tokens.encoder import Encoder, Tokens, tokenize
from brimful.data.tokens.token_stream import TokenStream, choose_workers

NASTY = ["", " ", "\x00", "a\x00b", "\u202e שלום عربي", "🙂\u200d🙂", "e\u0301", "\x07\x1b[0m", "\n\r\t", "[SEP]"]
ROWS = [f"row {i} " + "and more, of this and that " * (i % 7) + NASTY[i % len(NASTY)] for i in range(3000)]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.from_tokenizer(trained_tokenizers.make("minilm"), 24, with_types=True)


@pytest.fixture(scope="module")
def threads(encoder: Encoder) -> Iterator[TokenStream]:
    with TokenStream(encoder, num_workers=0) as stream:
        yield stream


@pytest.fixture(scope="module")
def processes(encoder: Encoder) -> Iterator[TokenStream]:
    """Two workers that are up: threads of this process tokenise no longer."""
    with TokenStream(encoder, num_workers=2) as stream:
        stream.submit(pa.array(["hello"])).result(timeout=60)
        wait(lambda: len(stream._processes) == sum(lane.is_alive() for lane in stream._lanes) == 2)
        yield stream


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream, "_SLICE_ROWS", 100)


def wait(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def equal(found: Tokens, expected: Tokens) -> None:
    for name in ("ids", "offsets", "types", "truncated"):
        values = getattr(found, name), getattr(expected, name)
        np.testing.assert_array_equal(*values)
        assert values[0] is None or values[0].dtype == values[1].dtype


@pytest.fixture(params=["threads", "processes"])
def stream(request: pytest.FixtureRequest) -> TokenStream:
    found: TokenStream = request.getfixturevalue(request.param)
    return found


def test_windows_are_those_of_tokenize(stream: TokenStream, encoder: Encoder) -> None:
    column = pa.chunked_array([pa.array(ROWS[:10], pa.large_string()), pa.array(ROWS[10:], pa.large_string())])
    futures = [stream.submit(column.slice(start, 700)) for start in range(0, 3000, 700)]
    for start, future in zip(range(0, 3000, 700), futures, strict=True):
        equal(future.result(timeout=60), tokenize(encoder, column.slice(start, 700)))


@pytest.mark.sampled
def test_pairs(stream: TokenStream, encoder: Encoder) -> None:
    found = stream.submit(pa.array(ROWS), pa.array(ROWS[::-1])).result(timeout=60)
    equal(found, encoder.encode(ROWS, ROWS[::-1]))
    with pytest.raises(ValueError, match="3,000 texts, and 1 to pair them with"):
        stream.submit(pa.array(ROWS), pa.array(["one"]))


texts = st.one_of(st.none(), st.text(max_size=20), st.sampled_from(NASTY))


@given(st.lists(st.tuples(texts, texts), max_size=12), st.integers(0, 5), st.booleans())
@example([(None, "a"), ("b", None), ("", ""), (None, None)], 0, True)
@example([(None, None)], 0, False)
@example([], 0, False)
def test_nulls_have_no_tokens(
    threads: TokenStream, encoder: Encoder, rows: list[tuple[str | None, str | None]], start: int, paired: bool
) -> None:
    """Of any slice of a column, also where a null hides bytes."""
    columns = [pa.array([row[i] for row in rows], pa.string()).slice(start) for i in (range(2) if paired else range(1))]
    found = threads.submit(*columns).result(timeout=60)
    values = list(zip(*(column.to_pylist() for column in columns), strict=True))
    for row, value in enumerate(values):
        expected = [] if None in value else encoder.encode(*([text] for text in value)).ids.tolist()
        assert found.sequence(row).tolist() == expected
    assert len(found) == len(values) == len(found.truncated)


def test_a_few_long_texts_among_short_ones(stream: TokenStream, encoder: Encoder) -> None:
    rows = ["long text " * 40_000, "short", "x" * 300_000, "", "a b c " * 100]
    equal(stream.submit(pa.array(rows)).result(timeout=60), encoder.encode(rows))


def test_before_workers_are_up_threads_tokenise(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream.token_worker, "COMMAND", ("-c", "import time; time.sleep(600)"))
    with TokenStream(encoder, num_workers=2) as stream:
        equal(stream.submit(pa.array(ROWS[:500])).result(timeout=60), encoder.encode(ROWS[:500]))


def test_the_tokenizers_errors_are_of_their_window(processes: TokenStream) -> None:
    strict = Encoder.from_tokenizer(trained_tokenizers.make("minilm"), 8, with_types=True, truncation="only_first")
    for workers in (0, 1):
        with TokenStream(strict, num_workers=workers) as stream:
            if workers:
                stream.submit(pa.array(["hello"])).result(timeout=60)
                wait(stream._worker_is_up.is_set)
            bad = stream.submit(pa.array(["a", "b"]), pa.array(["one", "one two three four five six seven"]))
            with pytest.raises(OptionError, match="leaves no room for the first one") as caught:
                bad.result(timeout=60)
            assert caught.value.hint
            assert len(stream.submit(pa.array(["a"]), pa.array(["b"])).result(timeout=60)) == 1


def test_a_worker_that_is_killed(encoder: Encoder) -> None:
    with TokenStream(encoder, num_workers=1) as stream:
        stream.submit(pa.array(["hello"])).result(timeout=60)
        wait(lambda: sum(lane.is_alive() for lane in stream._lanes) == 1)
        [process] = stream._processes
        os.kill(process.pid, signal.SIGSTOP)
        future = stream.submit(pa.array(ROWS))
        process.kill()
        with pytest.raises(DataError, match="a worker process that tokenises was ended by signal 9") as caught:
            future.result(timeout=60)
        assert caught.value.hint == "it may have run out of memory: try fewer workers"
        with pytest.raises(DataError, match="by signal 9"):
            stream.submit(pa.array(["once more"]))


def test_a_worker_that_does_not_start(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_stream.token_worker, "COMMAND", ("-c", "import sys; sys.exit(7)"))
    with TokenStream(encoder, num_workers=1) as stream:
        stream.submit(pa.array(["hello"]))
        wait(lambda: stream._error is not None)
        with pytest.raises(DataError, match="with exit code 7"):
            stream.submit(pa.array(["hello"]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_closing_in_the_middle(encoder: Encoder, num_workers: int) -> None:
    stream = TokenStream(encoder, num_workers=num_workers)
    futures = [stream.submit(pa.array(ROWS * 10)) for _ in range(3)]
    stream.close()
    stream.close()
    assert any(future.cancelled() for future in futures)
    assert all(process.poll() is not None for process in stream._processes)
    assert not any(thread.name == "brimful-tokens" and thread in stream._lanes for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        stream.submit(pa.array(["late"]))


def test_a_future_that_is_cancelled(threads: TokenStream) -> None:
    future = threads.submit(pa.array(ROWS * 3))
    future.cancel()
    assert len(threads.submit(pa.array(["after it"])).result(timeout=60)) == 1


MAIN = """
import os, sys, time
import pyarrow as pa
from tokenizers import Tokenizer
from brimful.data.tokens.token_stream import TokenStream
from brimful.data.tokens.encoder import Encoder

os.mkdir(sys.argv[1])  # once: no guard of __main__, and workers must not come by here
backend = Tokenizer.from_file(sys.argv[2])
backend.enable_truncation(24)
stream = TokenStream(Encoder(backend, 24, with_types=True), num_workers=2)
stream.submit(pa.array(["hello"])).result()
while len(stream._processes) < 2 or sum(lane.is_alive() for lane in stream._lanes) > 2:
    time.sleep(0.01)
try:
    print(*(process.pid for process in stream._processes), flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print(len(stream.submit(pa.array(["hello"])).result()), flush=True)
    stream.close()
"""


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path: Path, end: signal.Signals) -> None:
    """SIGKILL: by themselves. Ctrl-C reaches all, and they leave it to the parent. Neither says a word."""
    (tmp_path / "main.py").write_text(MAIN, "utf-8")
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "main.py", tmp_path / "once", f"{trained_tokenizers.MINILM}/tokenizer.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    assert parent.stdout is not None
    workers = [int(number) for number in parent.stdout.readline().split()]
    assert len(workers) == 2
    for worker in workers:
        wait(lambda worker=worker: "tokenizers" in Path(f"/proc/{worker}/maps").read_text())
        loaded = Path(f"/proc/{worker}/maps").read_text()
        assert "libtorch" not in loaded
        assert "libarrow" not in loaded
    (os.kill if end == signal.SIGKILL else os.killpg)(parent.pid, end)
    said, complained = parent.communicate(timeout=60)
    assert (said, complained) == ("1\n" if end == signal.SIGINT else "", "")
    wait(lambda: not any(_runs(worker) for worker in workers))


def _runs(process_id: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_bytes", "device", "cores", "expected"),
    [
        (None, "cpu", 64, 0),
        (None, "cuda", 16, 14),
        (None, "cuda", 128, 14),
        (1e9, "cuda", 8, 6),
        (1e5, "cuda", 16, 0),
        (None, "cuda", 3, 0),
        (None, "cuda", 1, 0),
    ],
)
def test_number_of_workers(num_bytes: float | None, device: str, cores: int, expected: int) -> None:
    assert choose_workers(num_bytes, device, cores) == expected
