"""Tokens, rows and seconds of each of several processes that train together, as their leader knows them."""

from __future__ import annotations

from collections.abc import Iterable

from brimful.core.records import Processes, ProcessWork
from brimful.data.batches.batch import Batch
from brimful.hardware.pulse import Beat
from brimful.hardware.ranks import Ranks


class SharedWork:
    """Work of all processes of a training since it began. Tokens are counted batch by batch, from the shares."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._tokens, self._samples = [0] * ranks.count, [0] * ranks.count
        self._most = 0  # tokens of the processes that had the most, each in its step

    def add(self, batch: Batch) -> None:
        """Count a batch, of which this process has its own part."""
        if batch.rows is None:
            return
        whole = batch.rows.whole
        shares = () if whole is None else whole.shares
        if not shares and self._ranks.data_count > 1:
            return
        each = [(int(lengths.sum()), len(lengths)) for lengths in shares]
        each = each or [(sum(map(len, batch.rows.ids)), len(batch.rows.ids))]  # all have the same rows
        self._most += max(tokens for tokens, _ in each)
        for rank in range(self._ranks.count):
            tokens, samples = each[rank // self._ranks.tensor_count]
            self._tokens[rank] += tokens
            self._samples[rank] += samples

    @property
    def imbalance(self) -> float:
        """Tokens of the process with the most in a step, over the mean of all."""
        return self._most * self._ranks.count / max(1, sum(self._tokens))

    def found(self, beats: Iterable[Beat]) -> Processes | None:
        """The work by now, with the seconds of `beats`; None for one process, and before the first step."""
        if self._ranks.count == 1 or not sum(self._tokens):
            return None
        each = tuple(
            ProcessWork(
                host=beat.host,
                device=beat.device,
                tokens=self._tokens[beat.rank],
                samples=self._samples[beat.rank],
                steps_s=beat.steps_s or None,
                waited_s=beat.waited_s if beat.steps_s else None,
                tokens_per_s=beat.tokens / beat.steps_s if beat.steps_s else None,
                sent_s=beat.sent_s or None,
                hidden_s=beat.hidden_s if beat.sent_s else None,
                peak_bytes=beat.peak_bytes,
                limit_bytes=beat.limit_bytes,
            )
            for beat in beats
        )
        return Processes(imbalance=self.imbalance, each=each)
