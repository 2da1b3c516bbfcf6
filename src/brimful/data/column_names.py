"""Usual names of columns, likeliest first."""

from __future__ import annotations

#: Columns of pairs that are given in Python, as keys of transformers' pipeline.
PAIR_COLUMNS = ("text", "text_pair")
PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("text", "text_pair"),
    ("query", "passage"),
    ("query", "document"),
    ("question", "passage"),
    ("question", "sentence"),
    ("question", "context"),
    ("question", "answer"),
)
TEXTS = (
    *("text", "texts", "sentence", "review", "review_text", "review_body", "content", "body", "tweet", "tweet_text"),
    *("comment", "comment_text", "document", "message", "post", "article", "utterance", "query", "question", "prompt"),
    *("input", "abstract", "description", "headline", "title"),
)
LABELS = (
    *("label", "labels", "class", "classes", "category", "categories", "target", "targets", "sentiment", "emotion"),
    *(
        "emotions",
        "intent",
        "topic",
        "gold_label",
        "coarse_label",
        "tag",
        "tags",
        "score",
        "rating",
        "stars",
        "overall",
        "y",
    ),
)
#: Columns that number the rows, as `key_of` gives their names: never the label, unless asked for.
IDS = {"", "id", "ids", "idx", "index", "guid", "uuid", "row", "unnamed:_0", "unnamed:_0.1", "__index_level_0__"}
#: All of these.
KNOWN = frozenset({*TEXTS, *LABELS, *IDS, *(name for pair in PAIRS for name in pair)})


def key_of(name: str) -> str:
    """A column's name as names are compared: `Review Text` is `review_text`."""
    return name.strip().lower().replace("-", "_").replace(" ", "_")
