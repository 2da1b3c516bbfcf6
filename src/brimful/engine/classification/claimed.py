"""Classify the files of a glob together with other processes, each of which claims one file after another.

All of them are given the same command, by whatever starts processes. They agree on columns, types and kernels by
looking at the same first rows, so that a file's results do not depend on who does it; see `data.writers.claims` for how
they share files.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from brimful.core.callbacks import Callbacks
from brimful.core.classification import AnswerEquivalence, ClaimedFiles, ClaimWorker, Classification, Counts
from brimful.core.errors import DataError, DiskFullError, OutputError, listed, printable
from brimful.core.options.classify import ClassifyOptions
from brimful.core.place import find_local_rank
from brimful.data.readers.in_memory import Tables
from brimful.data.writers.claimed_output import ClaimedOutput
from brimful.data.writers.claims import Claim
from brimful.data.writers.output_path import check_claimed
from brimful.engine.classification.identity import DEVICE, identity_of
from brimful.engine.classification.inputs import Given, look, make_request
from brimful.engine.classification.ready import Ready, make_ready
from brimful.engine.classification.request import Asked, Request
from brimful.engine.classification.stages import Busy
from brimful.engine.classification.window_pass import WindowPass, WorkLost
from brimful.hardware.device_memory import device_memory
from brimful.hardware.probe import choose_device

#: Most seconds between two looks at others' claims, and looks in a lease at least.
_LOOK_S, _LOOKS = 1.0, 4
#: Processes that are named while their files are waited for.
_FEW = 4


def classify_claimed(
    options: ClassifyOptions, *, command: str, callbacks: Callbacks, tables: Tables | None = None
) -> Classification:
    """Runs `options` with --claim; returns the record of the whole, once all files are done by whomever.

    Raises: as `classify_file`; DataError where a file cannot be classified, once all others are done.
    """
    assert options.output is not None
    check_claimed(Path(options.output))
    with ExitStack() as stack:
        device = choose_device(options.device, find_local_rank())
        stack.enter_context(device_memory(device, options.memory_limit, options.allocator))
        given = look(options, callbacks, tables)
        identity, pieces = identity_of(options, given), given.rows.by_part()
        # A file that was mended is another one; those that are done stay so, while columns and names are the same.
        identity["the input"] = sha256(repr((given.rows.files, str(given.rows.schema))).encode()).hexdigest()
        output = ClaimedOutput(
            Path(options.output),
            own={DEVICE: identity.pop(DEVICE)},
            identity=identity,
            pieces=[piece.fingerprint for piece in pieces],
            names=[piece.name for piece in pieces],
            shard_rows=options.shard_rows,
            lease_s=options.lease,
        )
        if (finished := output.enter()) is not None:
            callbacks.note(f"{options.output} is finished: there is nothing to do")
            return finished
        request = make_request(given, options, stack, callbacks)
        sample = request.submit(given.sample, Busy())()
        worker = _Worker(options, command, given, request, sample, output, stack, callbacks)
        record = worker.work()
        callbacks.note(f"written: {options.output}, {len(pieces):,} files of results")
        return record


class _Worker:
    """Claims and classifies files until none is left, then completes the whole."""

    def __init__(
        self, options: ClassifyOptions, command: str, given: Given, request: Request, sample: Asked,
        output: ClaimedOutput, stack: ExitStack, callbacks: Callbacks,
    ) -> None:  # fmt: skip
        self._options, self._command, self._given, self._output = options, command, given, output
        self._request, self._sample, self._stack, self._callbacks = request, sample, stack, callbacks
        self._pieces = given.rows.by_part()
        self._ready: Ready | None = None

    def work(self) -> Classification:
        """Do files until all are done. Raises: DataError for those that cannot be."""
        try:
            if self._left():  # loaded while nothing is claimed: a signal, or a compiler, costs nobody a lease
                self._ready = make_ready(
                    self._options, self._given, self._request, self._sample, self._stack, self._callbacks
                )
            while (claim := self._next()) is not None:
                with claim.working():
                    self._do(claim)
            if failures := self._output.claims.failures():
                first, others = failures[0], f", and {len(failures) - 1} more" if len(failures) > 1 else ""
                raise DataError(
                    f"{len(failures)} of {len(self._pieces):,} files cannot be classified: {first.message}{others}",
                    hint=f"{first.hint or 'mend it'}; the results of the other files are kept, and the same command"
                    " goes on",
                )
        except FileNotFoundError:  # the claims are gone
            if (finished := self._output.finished()) is None:
                said = f"{self._options.output} has lost its claims: somebody removed them"
                raise OutputError(said, hint="start again") from None
            return finished
        return self._output.complete(self._whole)

    def _left(self) -> int:
        """Files that have no results yet."""
        return len(self._pieces) - self._output.claims.num_done()

    def _next(self) -> Claim | None:
        """The next claim, waiting for other processes where they have all files that are left; None at the end."""
        claims, lease_s, told = self._output.claims, self._options.lease, False
        while (claim := claims.take()) is None:
            if (left := self._left() - len(claims.failures())) <= 0:
                return None
            if not told:
                told = True
                files = "1 file" if left == 1 else f"{left:,} files"
                self._callbacks.stage(f"waiting for {files}: {printable(listed(claims.owners(), _FEW), 300)}")
            time.sleep(min(_LOOK_S, lease_s / _LOOKS))
        return claim

    def _do(self, claim: Claim) -> None:
        """Classify a file and publish its results, unless another process has taken over."""
        try:
            assert self._ready is not None
            self._classify(claim, self._ready)
            if self._output.publish(claim):
                return
        except WorkLost:
            pass
        except DataError as error:
            self._callbacks.warning(str(error))
            claim.fail(str(error), error.hint)
            return
        except (OutputError, DiskFullError, FileNotFoundError):  # of a folder that is gone, where all is done
            if not claim.look():
                raise
        file = printable(self._pieces[claim.number].name, 200)
        self._callbacks.note(f"{file} was taken over by another process: it does it, or has done it")

    def _classify(self, claim: Claim, ready: Ready) -> None:
        number, rows = claim.number, self._pieces[claim.number]
        with self._output.open(claim) as kept:
            if kept.finished is not None:
                return
            if kept.counts.num_tokenizer_fallback:
                self._request.drop_cache()
            if kept.counts.token_budget is not None:
                ready.runner.forward.limit_to(kept.counts.token_budget)
            run = WindowPass(
                self._options,
                replace(self._given, rows=rows),
                self._request,
                ready,
                kept,
                self._callbacks,
                lost=lambda: claim.lost,
            )
            run.through(f"classifying {printable(rows.name, 200)} (file {number + 1:,} of {len(self._pieces):,})")
            record = run.record(self._command, None)
            by = ClaimWorker(
                host=socket.gethostname(),
                pid=os.getpid(),
                device=ready.runner.recipe.device,
                num_files=1,
                num_rows=record.counts.num_rows - record.resumed_rows,
                work_s=record.wall_s or 0.0,
            )
            claimed = ClaimedFiles(num_files=1, num_taken_over=int(claim.generation > 1), workers=(by,))
            kept.finish(replace(record, claimed=claimed, verify_s=ready.verify_s))

    def _whole(self, records: Sequence[Classification]) -> Classification:
        """The record of all files."""
        counts = sum((each.counts for each in records), Counts())
        claimed = _added([each.claimed for each in records if each.claimed is not None])
        devices = dict.fromkeys(each.device for each in claimed.workers)
        mixed = [f"files were classified on different devices: {', '.join(devices)}"] if len(devices) > 1 else []
        compared = [each.equivalence for each in records if each.equivalence is not None]
        return replace(
            records[0],
            command=self._command,
            labels=self._request.labels(counts),
            counts=counts,
            equivalence=min(compared, key=_quality, default=None),
            fallback="; ".join(dict.fromkeys(each.fallback for each in records if each.fallback)) or None,
            out_of_memory=tuple(found for each in records for found in each.out_of_memory),
            notes=tuple(dict.fromkeys([*mixed, *(note for each in records for note in each.notes)])),
            gpus=(),
            wall_s=None,
            verify_s=None,
            texts_per_s=None,
            tokens_per_s=None,
            mfu=None,
            stages=(),
            limit=None,
            resumed_rows=0,
            claimed=claimed,
        )


def _quality(found: AnswerEquivalence) -> tuple[bool, float]:
    """Order of comparisons of several processes: a failed one before others, then the largest difference."""
    return found.passed, -found.largest_difference


def _added(parts: Sequence[ClaimedFiles]) -> ClaimedFiles:
    workers: dict[tuple[str, int], ClaimWorker] = {}
    for by in (by for part in parts for by in part.workers):
        before = workers.get(key := (by.host, by.pid))
        workers[key] = by if before is None else replace(
            before,
            num_files=before.num_files + by.num_files,
            num_rows=before.num_rows + by.num_rows,
            work_s=before.work_s + by.work_s,
        )  # fmt: skip
    return ClaimedFiles(
        num_files=sum(part.num_files for part in parts),
        num_taken_over=sum(part.num_taken_over for part in parts),
        workers=tuple(workers[key] for key in sorted(workers)),
    )
