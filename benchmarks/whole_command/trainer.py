"""The same fine-tune by Hugging Face Trainer, as a script of one's own: JSONL in, a saved classifier out.

    python benchmarks/whole_command/trainer.py TRAIN EVAL MODEL OUTPUT '{"workers": 4}'

Rows are tokenised at once, batches padded to their longest row, bf16 on a GPU; an evaluation, a checkpoint and the
metrics that brimful reports after each epoch. Prints a line `PHASES {...}` of seconds at the end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()
#: Settings unless the command line says otherwise.
DEFAULTS: dict[str, Any] = {
    "workers": 4,
    "optim": "adamw_torch_fused",
    "nan_filter": False,
    "torch_compile": False,
    "epochs": 5,
    "batch_size": 32,
    "learning_rate": 2e-4,
    "max_length": 512,
}


def main() -> None:
    train_file, eval_file, model, output = sys.argv[1:5]
    settings = DEFAULTS | json.loads(sys.argv[5] if len(sys.argv) > 5 else "{}")
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    phases, marks = {}, [BEGAN, time.perf_counter()]
    phases["imports"] = marks[1] - marks[0]

    def mark(name: str) -> None:
        marks.append(time.perf_counter())
        phases[name] = marks[-1] - marks[-2]

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [_read(file) for file in (train_file, eval_file)]
    names = sorted({row["label"] for row in rows[0]})
    training, evaluation = (_encoded(part, tokenizer, names, settings["max_length"]) for part in rows)
    mark("data")
    loaded = AutoModelForSequenceClassification.from_pretrained(model, num_labels=len(names), dtype=torch.float32)
    loaded.config.id2label = dict(enumerate(names))
    loaded.config.label2id = {name: index for index, name in enumerate(names)}
    cuda = torch.cuda.is_available()
    precision = {"bf16": True, "tf32": True} if cuda else {"use_cpu": True}
    workers = {"dataloader_persistent_workers": True} if settings["workers"] else {}
    trainer = Trainer(
        model=loaded,
        args=TrainingArguments(
            output_dir=output,
            num_train_epochs=settings["epochs"],
            per_device_train_batch_size=settings["batch_size"],
            per_device_eval_batch_size=256,
            learning_rate=settings["learning_rate"],
            optim=settings["optim"],
            torch_compile=settings["torch_compile"],
            logging_nan_inf_filter=settings["nan_filter"],
            dataloader_num_workers=settings["workers"],
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
            seed=0,
            **precision,
            **workers,
        ),
        train_dataset=training,
        eval_dataset=evaluation,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=_metrics,
    )
    mark("model")
    trainer.train()
    mark("training, evaluations, checkpoints")
    trainer.save_model(f"{output}/model")
    mark("saved model")
    found = [entry for entry in trainer.state.log_history if "eval_accuracy" in entry]
    print("PHASES " + json.dumps(phases), "METRICS " + json.dumps(found[-1]), sep="\n", flush=True)


def _read(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]


def _encoded(rows: list[dict[str, str]], tokenizer: Any, names: list[str], max_length: int) -> list[dict[str, Any]]:
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=max_length)
    return [
        {key: values[i] for key, values in encoded.items()} | {"labels": names.index(row["label"])}
        for i, row in enumerate(rows)
    ]


def _metrics(predicted: Any) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    labels, answers = predicted.label_ids, predicted.predictions.argmax(-1)
    return {
        "accuracy": accuracy_score(labels, answers),
        "f1_macro": f1_score(labels, answers, average="macro"),
        "f1_weighted": f1_score(labels, answers, average="weighted"),
        "matthews_correlation": matthews_corrcoef(labels, answers),
    }


if __name__ == "__main__":
    main()
