"""Reranking: pairs of query and passage get the scores that sentence-transformers' CrossEncoder gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import brimful as package
from same import SCORE
from tiny_files import review, save_classifier

CrossEncoder = pytest.importorskip("sentence_transformers").CrossEncoder

QUERIES = [review(i % 2 == 0, i // 6) for i in range(24)]
PASSAGES = [review(i % 3 == 0, 7 * i) * (1 + i % 5) for i in range(24)]
IDENTITY = {"activation_fn": "torch.nn.modules.linear.Identity"}


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_scores_are_those_of_a_cross_encoder(family: str, tmp_path: Path) -> None:
    model = save_classifier(tmp_path, ["relevant"], family)
    with package.Classifier(model, precision="fp32") as classifier:
        scores = [answer["score"] for answer in classifier(QUERIES, pairs=PASSAGES)]
    theirs = CrossEncoder(str(model), device="cpu").predict(list(zip(QUERIES, PASSAGES, strict=True)))
    assert np.ptp(theirs) > 100 * SCORE
    np.testing.assert_allclose(scores, theirs, atol=SCORE)


def test_a_cross_encoder_that_predicts_logits(tmp_path: Path) -> None:
    """Its configuration says so; transformers' pipeline, which does not read that, gives sigmoids, and so does ours."""
    settings: dict[str, Any] = {"sentence_transformers": IDENTITY}
    model = save_classifier(tmp_path / "model", ["relevant"], **settings)
    pairs = list(zip(QUERIES, PASSAGES, strict=True))
    theirs = CrossEncoder(str(model), device="cpu").predict(pairs)
    with package.Classifier(model, precision="fp32") as classifier:
        np.testing.assert_allclose(classifier.logits(QUERIES, PASSAGES)[:, 0], theirs, atol=SCORE)
    rows, output = tmp_path / "rows.jsonl", tmp_path / "ranked.parquet"
    lines = [json.dumps({"query": query, "passage": passage}) for query, passage in pairs]
    rows.write_text("\n".join(lines), "utf-8")
    columns = {"text_column": "query", "pair_column": "passage"}
    package.classify(model, rows, output=output, precision="fp32", logits=True, **columns)
    table = pq.read_table(output)
    np.testing.assert_allclose(np.stack(table["logits"].to_numpy())[:, 0], theirs, atol=SCORE)
