"""Speed of one thread at tokenising with BERT's vocabulary: `tokenizers` alone, and with the word cache.

    python benchmarks/classification/words.py TOKENIZER

TOKENIZER: a folder with a BERT tokenizer. Prints a table of texts a second: half of a corpus is encoded to warm up,
then the other half, most of whose words were in the first one, then that half again.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # before it is imported

import numpy as np
from transformers import AutoTokenizer

from brimful.data.readers.packaged import bbc_news, tweets
from brimful.data.tokens.encoder import Encoder


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    print("| texts | tokens in the mean | | new ones, texts/s | again, texts/s |\n|---|---|---|---|---|")
    for name, rows in (("BBC News, cut at 512", bbc_news()), ("tweets", tweets())):
        texts = [str(row["text"]) for row in rows]
        first, second = texts[::2], texts[1::2]
        expected: np.ndarray | None = None
        for use_cache in (False, True):
            encoder = Encoder.from_tokenizer(tokenizer, 512, with_types=True)
            encoder.encode(first, use_cache=use_cache)
            seconds = []
            for _ in range(2):
                began = time.perf_counter()
                found = encoder.encode(second, use_cache=use_cache)
                seconds.append(time.perf_counter() - began)
            if expected is not None and not np.array_equal(found.ids, expected):
                sys.exit("the ids differ")
            expected = found.ids
            rates = " | ".join(f"{len(second) / each:,.0f}" for each in seconds)
            side = "words" if use_cache else "tokenizers"
            print(f"| {name} | {found.lengths.mean():.0f} | {side} | {rates} |", flush=True)


if __name__ == "__main__":
    main()
