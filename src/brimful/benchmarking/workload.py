"""The work of a bench, made alike in the process of each row: rows, their order, and the model's first weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from brimful.benchmarking.even_blocks import even_blocks
from brimful.benchmarking.waiting import ThreadTimes, thread_times, waiting_share
from brimful.core.bench import Steps, Workload, is_disturbed
from brimful.core.callbacks import Callbacks
from brimful.core.errors import DataError, OptionError
from brimful.core.options.bench import BenchOptions
from brimful.core.options.train import TrainOptions
from brimful.data.batches.batch import Sampler
from brimful.data.tokens.encoder import Tokens
from brimful.engine.prepare import Prepared, prepare
from brimful.engine.sequence_lengths import longest_sequence
from brimful.hardware.device_memory import check_on_gpu
from brimful.hardware.memory import is_out_of_memory, release_unused
from brimful.hardware.probe import choose_device, device_name, probe
from brimful.hardware.specs import datasheet_flops_per_s
from brimful.levers.packing import streamed_to
from brimful.levers.precision import choose_precision, supports
from brimful.measurement.peaks import product_rate
from brimful.models.hub.inspection import ModelFacts, inspect_model
from brimful.models.hub.load import load_model
from brimful.models.hub.quiet import quiet_transformers
from brimful.models.model_stats import token_operations, useful_attention
from brimful.models.packed.packed_forward import has_token_types

#: Random tokens are drawn from here on, as in the guide: below are a tokenizer's special ones.
_FIRST_TOKEN, _LAST_TOKEN = 100, 30_000
#: Rows and tokens of random data, where nothing is asked for.
SHAPES = {"cuda": "512x512", "cpu": "256x128"}
_RANDOM = "random tokens"
#: Precisions whose matrix products are measured.
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
#: Seconds for the products of one precision.
_RATE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """Rows, in memory. options: of train. random: whether they are random tokens, all of one length."""

    options: TrainOptions
    prepared: Prepared
    device: torch.device
    random: bool

    def model(self) -> Any:
        """The classifier before its first step, on the CPU, in training mode: the same in every process."""
        prepared, seed, folder = self.prepared, self.options.seed, streamed_to(self.options)
        head = prepared.alignment.head
        return load_model(prepared.facts, prepared.space, head=head, seed=seed, folder=folder).train()

    def samples(self, number: int) -> npt.NDArray[np.int64]:
        """Rows of the batch of this number."""
        return self.prepared.order.samples(number)

    def lengths(self, numbers: range) -> npt.NDArray[np.int64]:
        """Tokens of each row of these batches."""
        samples = np.concatenate([self.samples(number) for number in numbers])
        return np.asarray(self.prepared.training.tokens.lengths[samples])


def make_work(asked: BenchOptions, callbacks: Callbacks, steps: Steps | None = None, **settings: object) -> Work:
    """Read and tokenise the rows of a bench, or draw random ones.

    steps: for whose blocks batches are dealt evenly. settings: of a row, by names of TrainOptions.

    Raises: InputError for what cannot be done as asked; DataError for fewer rows than a batch has.
    """
    device = choose_device(asked.device)
    options = asked.train_options(**settings)
    check_on_gpu(device, options.memory_limit, options.allocator)
    if asked.data is None:
        rows, length = asked.shape_of(SHAPES[device.type])
        if asked.shape is None:
            length = min(length, longest_sequence(None, _facts(asked), asked.model))
        else:
            _check_shape(asked, length)
        prepared = _random_rows(options, rows, length, callbacks)
    else:
        prepared = prepare(options, callbacks)
    batch_size, number = options.batch_size, len(prepared.training.tokens)
    if number < batch_size:
        said = f"there are {number:,} rows, and a batch has {batch_size:,}"
        raise DataError(said, hint="lower --batch-size, or give more rows")
    order = Sampler(num_samples=number - number % batch_size, batch_size=batch_size, seed=options.seed)
    if steps is not None:
        order = even_blocks(order, prepared.training.tokens.lengths, steps)
    prepared = dataclasses.replace(prepared, order=order)
    return Work(options=options, prepared=prepared, device=device, random=asked.data is None)


def _facts(asked: BenchOptions) -> ModelFacts:
    return inspect_model(asked.model, trust_remote_code=asked.trust_remote_code, allow_pickle=asked.allow_pickle)


def _check_shape(asked: BenchOptions, length: int) -> None:
    """Raises: OptionError for sequences of more tokens than the model has positions."""
    most = _facts(asked).max_positions
    if most is not None and length > most:
        said = f"--shape is {asked.shape}, and {asked.model} has positions for {most} tokens"
        raise OptionError(said, hint=f"use at most {most} tokens")


def _random_rows(options: TrainOptions, rows: int, length: int, callbacks: Callbacks) -> Prepared:
    """A run on random tokens, all sequences of one length, with two labels by chance."""
    draw = np.random.default_rng(options.seed)
    labels = draw.integers(2, size=rows)
    labels[: min(2, rows)] = np.arange(min(2, rows))
    texts = [f"text {number}" for number in range(rows)]  # no two equal, as the tokens are
    table = pa.table({"text": texts, "label": [f"label {each}" for each in labels]})
    asked = dataclasses.replace(
        options, data=_RANDOM, max_length=length, new_head=True, task="single_label", limit=None, text_column="text",
        label_column="label", pair_column=None, column_names=None, header=None,
    )  # fmt: skip
    prepared = prepare(asked, callbacks, tables={_RANDOM: table})
    vocabulary = prepared.facts.config.get_text_config().vocab_size
    last = min(_LAST_TOKEN, vocabulary)
    tokens = Tokens(
        ids=draw.integers(min(_FIRST_TOKEN, last - 1), last, rows * length, dtype=np.int32),
        offsets=np.arange(rows + 1, dtype=np.int64) * length,
        types=np.zeros(rows * length, np.uint8) if has_token_types(prepared.facts.config) else None,
        truncated=np.zeros(rows, dtype=np.bool_),
    )
    return dataclasses.replace(prepared, training=dataclasses.replace(prepared.training, tokens=tokens))


def useful_flops(model: Any, lengths: npt.NDArray[np.int64]) -> float | None:
    """Operations that a forward and a backward pass over real tokens need; None for models where they are unknown."""
    per_token, among = token_operations(model), useful_attention(model, lengths)
    return None if per_token is None or among is None else float(per_token * int(lengths.sum()) + among)


def describe(work: Work) -> Workload:
    """Return the facts of the work and the machine; measure rates of matrix products and the time of a plain step."""
    prepared, device = work.prepared, work.device
    lengths, model = prepared.training.tokens.lengths, work.model()
    rates, waits, name = dict[str, float](), dict[str, float](), device_name(device)
    for precision in _PRECISIONS:
        if (precision != "fp16" or device.type == "cuda") and supports(precision, device).ok:
            chosen = choose_precision(precision, device)  # type: ignore[arg-type]
            with chosen.apply():
                rates[precision], waited = best_rate(partial(product_rate, device, chosen.dtype))
            waits |= {} if waited is None else {precision: waited}
    datasheet = {each: rate for each in rates if (rate := datasheet_flops_per_s(name, each)) is not None}
    return Workload(
        device=name,
        task=prepared.space.task,
        labels=prepared.space.num_outputs,
        rows=prepared.order.num_samples,
        batch_size=work.options.batch_size,
        median_tokens=int(np.median(lengths)),
        longest_tokens=int(lengths.max()),
        data_fingerprint=prepared.data_fingerprint,
        model_type=prepared.facts.model_type,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        machine=probe(),
        rates=rates,
        datasheet=datasheet,
        num_threads=torch.get_num_threads(),
        rows_left_out=len(lengths) - prepared.order.num_samples,
        rates_waiting=waits,
        step_s=_plain_step_s(work, model),
    )


def best_rate(
    measure: Callable[[], float], *, within_s: float = _RATE_S, times: Callable[[], ThreadTimes] = thread_times
) -> tuple[float, float | None]:
    """The best of the rates that `measure` finds within some seconds, two at least, and the share of its time in which
    threads waited for a core, None where the system does not say. Where others were busy meanwhile, it takes up to 3
    times as long."""
    began, found = time.monotonic(), list[tuple[float, float | None]]()
    while True:
        before = times()
        rate = measure()
        found.append((rate, waiting_share(before, times())))
        best, waited = max(found, key=lambda each: each[0])
        spent, busy = time.monotonic() - began, is_disturbed(None, None, waited)
        if len(found) > 1 and spent >= (3 * within_s if busy else within_s):
            return best, waited


def _plain_step_s(work: Work, model: Any) -> float:
    """Seconds of transformers' forward and backward pass over a batch, padded, in fp32: the second of two.

    Of an eighth of the batch on a CPU, and of as many rows as memory has room for, times as many.
    """
    tokens, device = work.prepared.training.tokens, work.device
    model = model.to(device)
    batch = work.samples(0)
    rows = len(batch) if device.type == "cuda" else max(1, len(batch) // 8)
    while True:
        ids = [torch.as_tensor(tokens.sequence(int(each)).astype(np.int64)) for each in batch[:rows]]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(each) for each in ids], batch_first=True).to(device)
        try:
            for _ in range(2):
                began = time.perf_counter()
                with quiet_transformers():
                    model(input_ids=padded, attention_mask=mask).logits.float().square().mean().backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            return (time.perf_counter() - began) * len(batch) / rows
        except Exception as error:
            if rows == 1 or not is_out_of_memory(error):
                raise
        model.zero_grad(set_to_none=True)
        release_unused(device)
        rows //= 2
