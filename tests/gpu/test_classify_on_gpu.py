"""Classification on a GPU: captured against eager, resumed against left alone, several GPUs, and no wait in a pass."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, TextClassificationPipeline

import brimful
from brimful.core.callbacks import Callbacks
from brimful.engine.classification.gpu_workers import GpuWorkers
from brimful.step.graphs.captured_forward import PackedForward
from gpu.waits import no_waiting
from tiny_files import BAD, GOOD, OTHER, save_tokenizer

pytestmark = pytest.mark.gpu

LONGEST = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with heads of 64 and wide enough for fp8; weights large enough that answers differ."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024,
        initializer_range=0.1, num_labels=3, max_position_embeddings=LONGEST,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def texts(number: int, longest: int = 200) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(GOOD + BAD + OTHER, k=draw.randint(1, longest))) for _ in range(number)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_modes_and_windows(model: Path, precision: str) -> None:
    """Captured passes give the bits of eager ones, the second time as the first; fused ones are equivalent."""
    given, found = texts(3000), {}
    for execution in ("eager", "captured", "compiled"):
        with brimful.Classifier(model, execution=execution, precision=precision, max_length=LONGEST) as classifier:
            found[execution] = classifier.logits(given)
            assert np.array_equal(found[execution], classifier.logits(given))
    assert np.array_equal(found["eager"], found["captured"])
    allowed = {"fp32": 1e-4, "bf16": 0.08, "fp16": 0.01}[precision]
    assert float(np.abs(found["compiled"] - found["eager"]).max()) < allowed


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_labels_are_those_of_the_pipeline(model: Path, precision: str) -> None:
    given = texts(400)
    plain = BertForSequenceClassification.from_pretrained(model).cuda()
    with brimful.Classifier(model, execution="compiled", precision=precision, max_length=LONGEST) as classifier:
        pipeline: Any = TextClassificationPipeline(
            model=plain, tokenizer=AutoTokenizer.from_pretrained(model), device=0
        )
        expected = pipeline(given, batch_size=32, truncation=True, max_length=LONGEST, top_k=None)
        found = classifier(given)
    margin = {"fp32": 1e-4, "bf16": 0.05, "fp8": 0.1}[precision]
    for ours, (best, second, _) in zip(found, expected, strict=True):
        assert abs(ours["score"] - best["score"]) < margin
        assert ours["label"] == best["label"] or best["score"] - second["score"] < margin


@pytest.mark.parametrize("execution", ["captured", "compiled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_company_changes_a_logit_by_rounding_only(model: Path, precision: str, execution: str) -> None:
    """A text alone, among others, in another order, and in micro-batches of another size."""
    given, options = texts(300), {"execution": execution, "precision": precision, "max_length": LONGEST}
    with (
        brimful.Classifier(model, **options) as classifier,
        brimful.Classifier(model, token_budget=2048, **options) as small,
    ):
        together_NC = classifier.logits(given)
        others = {
            "alone": np.concatenate([classifier.logits([text]) for text in given[:100]]),
            "reversed": classifier.logits(given[::-1])[::-1],
            "in small micro-batches": small.logits(given),
        }
    for company, logits_NC in others.items():
        largest = float(np.abs(logits_NC - together_NC[: len(logits_NC)]).max())
        print(f"{precision}, {execution}, {company}: {largest:.2g} of logits up to {np.abs(together_NC).max():.2g}")
        assert largest < {"fp32": 1e-4, "bf16": 0.08, "fp16": 0.01}[precision]


class _StopHalfway(Callbacks):
    def count(self, done: int, total: int | None, share: float | None = None) -> None:
        if total is not None and done > total / 2:
            raise KeyboardInterrupt


def test_a_resumed_run_ends_with_the_same_bytes(model: Path, tmp_path: Path) -> None:
    long = [f"{text} {'and so on ' * 1600}" for text in texts(3000)]  # windows end by their bytes
    pq.write_table(pa.table({"text": long}), tmp_path / "rows.parquet")
    options: dict[str, Any] = {"max_length": 64, "top_k": 0, "shard_rows": 500, "execution": "compiled"}
    brimful.classify(model, tmp_path / "rows.parquet", tmp_path / "alone", **options)
    with pytest.raises(KeyboardInterrupt):
        brimful.classify(model, tmp_path / "rows.parquet", tmp_path / "stopped", callbacks=_StopHalfway(), **options)
    done = brimful.classify(model, tmp_path / "rows.parquet", tmp_path / "stopped", resume=True, **options)
    assert done.counts.num_rows == 3000
    alone, stopped = ({p.name: p.read_bytes() for p in (tmp_path / n).glob("*.parquet")} for n in ("alone", "stopped"))
    assert len(alone) == 6
    assert alone == stopped


def test_nothing_waits_for_the_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a window of each shape has run, submitting the next one synchronises nothing."""
    submit, seen = PackedForward.submit, []

    def watched(self: PackedForward, tokens: Any) -> Any:
        if seen.count(len(tokens)) < 3:  # eager, captured, replayed
            seen.append(len(tokens))
            return submit(self, tokens)
        with no_waiting():
            seen.append(len(tokens))
            return submit(self, tokens)

    monkeypatch.setattr(PackedForward, "submit", watched)
    given = texts(2000, longest=40)
    with brimful.Classifier(model, execution="compiled", max_length=LONGEST) as classifier:
        for _ in range(6):
            classifier.logits(given)
    assert seen.count(2000) >= 6


def test_several_gpus_write_what_one_writes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    used: list[int] = []

    def all_ready(gpu_workers: GpuWorkers) -> GpuWorkers:
        assert all(other.ready.wait(240) for other in gpu_workers._others)
        return gpu_workers

    def leave(gpu_workers: GpuWorkers, *given: object) -> None:
        used.append(gpu_workers.num_used)
        exit_gpu_workers(gpu_workers, *given)

    exit_gpu_workers = GpuWorkers.__exit__
    monkeypatch.setattr(GpuWorkers, "__enter__", all_ready)
    monkeypatch.setattr(GpuWorkers, "__exit__", leave)
    long = [f"{text} {'and so on ' * 1600}" for text in texts(3000)]
    pq.write_table(pa.table({"text": long}), tmp_path / "rows.parquet")
    options: dict[str, Any] = {"max_length": 64, "shard_rows": 500, "execution": "compiled"}
    for number in (1, 2):
        brimful.classify(model, tmp_path / "rows.parquet", tmp_path / f"by{number}", gpus=str(number), **options)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / f"by{n}").glob("*.parquet")} for n in (1, 2))
    assert one == two
    assert used == [1, 2]


def test_launched_processes_write_and_score_what_one_does(model: Path, tmp_path: Path) -> None:
    """torchrun with a process for each of two GPUs, whose results travel by way of the hosts."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    rows = pa.table({"text": texts(40_000), "label": [f"LABEL_{i % 3}" for i in range(40_000)]})
    pq.write_table(rows, tmp_path / "rows.parquet")
    one = [sys.executable, "-m", "brimful"]
    both = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "brimful"]
    for number, launched in (("one", one), ("two", both)):
        given = [str(model), str(tmp_path / "rows.parquet"), "--execution", "captured"]
        subprocess.run([*launched, "classify", *given, "-o", str(tmp_path / f"{number}.parquet")], check=True)
        subprocess.run([*launched, "evaluate", *given, "-o", str(tmp_path / f"{number}.csv")], check=True)
    for suffix in ("parquet", "csv"):
        assert (tmp_path / f"two.{suffix}").read_bytes() == (tmp_path / f"one.{suffix}").read_bytes()
