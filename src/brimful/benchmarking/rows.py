"""Rows of a bench: the guide's table, every lever, or settings that the user names; Trainer's counterpart of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, zip_longest
from typing import Any, get_args, get_type_hints

from brimful.core.bench import RECOMMENDED, Row
from brimful.core.errors import OptionError, did_you_mean, printable
from brimful.core.options.bench import BenchOptions
from brimful.core.options.train import TrainOptions

#: Settings that a row may have: how a step is run, and what is learned by it. Data, seed and lengths are the bench's.
SETTINGS = (
    *("precision", "packing", "token_budget", "per_device_batch_size", "gradient_accumulation_steps"),
    *("gradient_checkpointing", "activation_memory", "execution", "stream_weights", "deterministic", "allocator"),
    *("optim", "optim_args", "optimizer_in_backward", "late_clipping", "optimizer_offload", "optimizer_state_dtype"),
    *("weight_dtype", "max_grad_norm", "weight_decay", "prefetch", "peft", "lora_r", "lora_alpha", "freeze"),
)
#: Those that decide what is learned: a row with one of them is never recommended.
LEARNED = frozenset(
    {"optim", "optim_args", "late_clipping", "max_grad_norm", "weight_decay", "peft", "lora_r", "lora_alpha", "freeze"}
)
#: Settings of ours that Trainer takes by the same name.
_SAME = ("optim", "optim_args", "max_grad_norm", "weight_decay")
_CHECKPOINTS = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
_FREED = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
_LATE = {"optimizer_in_backward": True, "late_clipping": True}
_SMALL = {"optimizer_state_dtype": "bf16", "weight_dtype": "bf16", **_LATE}
_SMALLEST = _SMALL | {"optimizer_state_dtype": "8bit"}
_FULL, _COMPILED = {"gradient_checkpointing": "full"}, {"execution": "compiled"}
#: Activations as few as can be, by parts of layers that are computed again.
_FEWEST = {"gradient_checkpointing": "selective"}
_EXPANDABLE = {"allocator": "expandable"}
#: Nothing but fp32, with what may wait in host memory there, and a limit of what activations may have on the device.
_OFFLOADED = {"precision": "fp32", "optimizer_offload": True, "activation_memory": "1800MB"}
_EXACT = _OFFLOADED | _FREED | _COMPILED | _EXPANDABLE
#: Rows of ours in the least memory, the first of each kind the one that is to be seen first.
_LEAN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16 weights, 8-bit states, in backward, fewest activations, compiled", _SMALLEST | _FEWEST | _COMPILED),
    ("bf16 weights and states, in backward, compiled, expandable segments", _SMALL | _COMPILED | _EXPANDABLE),
    ("fp32, states offloaded, in backward, selective", _EXACT | {"gradient_checkpointing": "selective"}),
    ("bf16 weights, 8-bit states, in backward, compiled", _SMALLEST | _COMPILED),
    ("bf16 weights and states, in backward, compiled", _SMALL | _COMPILED),
    ("fp32, states offloaded, in backward, activations offloaded", _EXACT | {"gradient_checkpointing": "offload"}),
    ("bf16 weights, 8-bit states, in backward, checkpointing", _SMALLEST | _FULL),
    ("bf16 weights, 8-bit states, in backward", _SMALLEST),
)
#: Of Trainer's rows, beside its own arguments: most lengths that batches are padded to, each of which is a CUDA graph.
PADDED_LENGTHS = "padded_lengths"
_FED = {"dataloader_num_workers": 4, "dataloader_persistent_workers": True}
_GRAPHS = {"torch_compile": True, "torch_compile_mode": "reduce-overhead", PADDED_LENGTHS: 4}
#: Trainer's plain row, which all others are compared with.
PLAIN = Row(side="trainer", name="plain")
_OUR_PLAIN = "brimful: plain"
#: Trainer's row in the precision that rows of `LEVER=VALUE` have on a GPU.
_HALF = Row(side="trainer", name="bf16", settings={"bf16": True}, base=PLAIN.key)
_WITH_WORKERS = "trainer: bf16, workers"


def rows_of(options: BenchOptions, *, longest: int, on_gpu: bool) -> list[Row]:
    """Rows that `--rows` asks for, without the recommended one, each once; Trainer's plain row first. Of rows with the
    same settings the first stands for all.

    longest: tokens of the longest sequence. Raises: OptionError.
    """
    found = _named(options, longest=longest, on_gpu=on_gpu)
    same = _same(found)
    return [replace(row, base=row.base and same.get(row.base, row.base)) for row in found if row.key not in same]


def same_rows(options: BenchOptions, *, longest: int, on_gpu: bool) -> dict[str, str]:
    """Keys of rows that are asked for and have the settings of another one, with the key of that."""
    return _same(_named(options, longest=longest, on_gpu=on_gpu))


def _same(rows: Sequence[Row]) -> dict[str, str]:
    first, found = dict[str, str](), dict[str, str]()
    for row in rows:
        if first.setdefault(row.identity, row.key) != row.key:
            found[row.key] = first[row.identity]
    return found


def _named(options: BenchOptions, *, longest: int, on_gpu: bool) -> list[Row]:
    """Rows by their names, each name once."""
    found, precision = [PLAIN], "bf16" if on_gpu else "fp32"
    for name in words_of(options.rows):
        if name in _PRESETS:
            rows = _PRESETS[name](options.batch_size, longest)
        elif "=" in name:
            plain = _ours(_HALF.name if on_gpu else "plain", {"precision": precision}, PLAIN.key)
            rows = [*([_HALF] if on_gpu else []), plain, *_asked(options, name, precision, plain.key)]
        else:
            said = f"--rows has '{printable(name)}': it is no set of rows and no LEVER=VALUE"
            known = f"the sets are {', '.join(_PRESETS)}; as in --rows guide,precision=bf16"
            raise OptionError(said, hint=did_you_mean(name, list(_PRESETS)) or known)
        found += apart(found, [_with_needs(row, on_gpu) for row in rows])
    unique = dict[str, Row]()
    for row in found:
        unique.setdefault(row.key, row)
    return list(unique.values())


def words_of(rows: str) -> list[str]:
    """Words of `--rows`, each once."""
    return list(dict.fromkeys(word.strip() for word in rows.split(",")))


def apart(taken: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The rows; where one has the name of another with other settings, in `taken` or before it, its precision is added
    to its name."""
    known, names = {row.key: row.identity for row in taken}, dict[str, str]()
    found = list[Row]()
    for row in rows:
        each = row
        for more in count(1):
            if known.setdefault(each.key, each.identity) == each.identity:
                break
            each = replace(row, name=f"{row.name}, {_precision(row)}" + (f" ({more})" if more > 1 else ""))
        names[row.key] = each.key
        found.append(replace(each, base=each.base and names.get(each.base, each.base)))
    return found


def _precision(row: Row) -> str:
    """The precision that a row of either side asks for."""
    named = next((each for each in ("bf16", "fp16", "tf32") if row.settings.get(each) is True), "fp32")
    return str(row.settings.get("precision", named))


def in_turns(rows: Sequence[Row]) -> list[Row]:
    """Return rows in the order to measure them in: the first, and then one of ours and one of Trainer's, so that both
    sides have rows where time is over before all are measured."""
    first, *others = rows
    ours, theirs = ([row for row in others if row.side == side] for side in ("brimful", "trainer"))
    both = zip_longest(ours, theirs)
    return [first, *(row for pair in both for row in pair if row is not None)]


def check_rows(options: BenchOptions) -> None:
    """Check names and values of all rows. Raises: OptionError."""
    for row in rows_of(options, longest=512, on_gpu=True):
        if row.side == "brimful":
            options.train_options(**row.settings)


def recommended_of(row: Row) -> Row:
    """The row that measures the recommended settings once more."""
    return Row(side="brimful", name=RECOMMENDED, settings=row.settings, base=row.key, needs_gpu=row.needs_gpu)


def _default(batch_size: int, longest: int) -> list[Row]:
    micro, pieces = _quarters(batch_size)
    return [
        Row(side="trainer", name="accumulation", settings=_accumulated(micro, pieces), base=PLAIN.key),
        Row(side="trainer", name="checkpointing", settings=_CHECKPOINTS, base=PLAIN.key),
        Row(side="trainer", name="bf16", settings={"bf16": True}, base=PLAIN.key),
        _ours("fp32", {"precision": "fp32"}, PLAIN.key),
        _ours("fp32, accumulation", {"precision": "fp32", "token_budget": micro * longest}, "brimful: fp32"),
        _ours("fp32, checkpointing", {"precision": "fp32", "gradient_checkpointing": "full"}, "brimful: fp32"),
        _ours("bf16", {"precision": "bf16"}, "brimful: fp32"),
    ]


def _best(batch_size: int, longest: int) -> list[Row]:
    """Trainer with workers and compiled, as CUDA graphs too, beside ours."""
    theirs, bf16 = {"bf16": True, **_FED}, {"precision": "bf16"}
    return [
        Row(side="trainer", name="bf16, workers", settings=theirs, base=PLAIN.key),
        Row(side="trainer", name="bf16, compiled", settings=theirs | {"torch_compile": True}, base=_WITH_WORKERS),
        Row(side="trainer", name="bf16, CUDA graphs", settings=theirs | _GRAPHS, base=_WITH_WORKERS),
        _ours("fp32", {"precision": "fp32"}, PLAIN.key),
        _ours("bf16", bf16, "brimful: fp32"),
        _ours("bf16, compiled", bf16 | _COMPILED, "brimful: bf16"),
    ]


def _guide(batch_size: int, longest: int) -> list[Row]:
    """The nine ways of Hugging Face's guide to memory and speed on one GPU, and ours."""
    micro, pieces = _quarters(batch_size)
    one = _accumulated(micro, pieces)
    lean = one | _CHECKPOINTS
    fp16 = lean | {"fp16": True}
    theirs = (
        ("accumulation", one, "plain"),
        ("accumulation, checkpointing", lean, "accumulation"),
        ("fp16", {"fp16": True}, "plain"),
        ("fp16, accumulation, checkpointing", fp16, "plain"),
        ("Adafactor", {"optim": "adafactor"}, "plain"),
        ("all, Adafactor", fp16 | {"optim": "adafactor"}, "plain"),
        ("8-bit Adam", {"optim": "adamw_bnb_8bit"}, "plain"),
        ("all, 8-bit Adam", fp16 | {"optim": "adamw_bnb_8bit"}, "plain"),
    )
    full, bf16 = _FULL, {"precision": "bf16"}
    ours: tuple[tuple[str, dict[str, Any]], ...] = (
        ("bf16", {}),
        ("bf16, compiled", _COMPILED),
        ("split in four", {"token_budget": micro * longest}),
        ("checkpointing", full),
        ("selective", {"gradient_checkpointing": "selective", "activation_memory": "1GB"}),
        ("activations offloaded", {"gradient_checkpointing": "offload"}),
        ("states offloaded", {"optimizer_offload": True}),
        ("updated in backward", _FREED),
        ("checkpointing, updated in backward, states offloaded", full | _FREED | {"optimizer_offload": True}),
        ("bf16 weights and states, in backward", _SMALL),
        ("bf16 weights and states, in backward, checkpointing", _SMALL | full),
        ("Adafactor", {"optim": "adafactor"}),
        ("8-bit Adam", {"optim": "adamw_bnb_8bit"}),
        ("checkpointing, 8-bit Adam", full | {"optim": "adamw_bnb_8bit"}),
    )
    return [
        *(Row(side="trainer", name=name, settings=each, base=f"trainer: {base}") for name, each, base in theirs),
        _ours("fp32", {"precision": "fp32"}, PLAIN.key),
        *(_ours(name, bf16 | each, "brimful: fp32" if name == "bf16" else "brimful: bf16") for name, each in ours),
        _ours("fp16", {"precision": "fp16"}, "brimful: fp32"),
        *_leanest(),
    ]


def _lean(batch_size: int, longest: int) -> list[Row]:
    """Rows of ours in the least memory, beside Trainer's plain one, and its own without clipping: as ours update
    weights while gradients come, they clip nothing, or by the norm of the step before."""
    theirs = Row(side="trainer", name="not clipped", settings={"max_grad_norm": 0.0}, base=PLAIN.key)
    return [theirs, *_leanest()]


def _leanest() -> list[Row]:
    return [_ours(name, {"precision": "bf16"} | each, PLAIN.key) for name, each in _LEAN]


def _levers(batch_size: int, longest: int) -> list[Row]:
    """Each way to train of ours against our plain row, with Trainer's counterpart where there is one."""
    micro, _ = _quarters(batch_size)
    levers: tuple[tuple[str, dict[str, Any]], ...] = (
        ("tf32", {"precision": "tf32"}),
        ("bf16", {"precision": "bf16"}),
        ("fp16", {"precision": "fp16"}),
        ("fp8", {"precision": "fp8", **_COMPILED}),  # of fused layers
        ("compiled", {"execution": "compiled"}),
        ("accumulation", {"token_budget": micro * longest}),
        ("checkpointing", {"gradient_checkpointing": "full"}),
        ("every other layer", {"gradient_checkpointing": "every-2"}),
        ("selective", {"gradient_checkpointing": "selective"}),
        ("activations offloaded", {"gradient_checkpointing": "offload"}),
        ("states offloaded", {"optimizer_offload": True}),
        ("updated in backward", _FREED),
        ("states in bf16", {"optimizer_state_dtype": "bf16"}),
        ("states in 8 bits", {"optimizer_state_dtype": "8bit"}),
        ("bf16 weights and states", {"precision": "bf16", **_SMALL}),
        ("Adafactor", {"optim": "adafactor"}),
        ("8-bit Adam", {"optim": "adamw_bnb_8bit"}),
        ("paged 8-bit Adam", {"optim": "paged_adamw_8bit"}),
        ("4-bit Adam", {"optim": "adamw_torch_4bit"}),
        ("Lion", {"optim": "lion_32bit"}),
        ("schedule-free AdamW", {"optim": "schedule_free_adamw"}),
        ("LoRA", {"peft": "lora"}),
        ("embeddings frozen", {"freeze": "embeddings"}),
        ("weights streamed", {"stream_weights": "host"}),
        ("expandable segments", {"allocator": "expandable"}),
        ("not packed", {"packing": "off"}),
    )
    fp32, found = {"precision": "fp32"}, [_ours("plain", {"precision": "fp32"}, PLAIN.key)]
    for name, settings in levers:
        asked = settings | {"per_device_batch_size": micro} if name == "accumulation" else settings
        theirs = trainers_settings(asked, batch_size)
        if theirs is not None:
            found.append(Row(side="trainer", name=name, settings=theirs, base=PLAIN.key))
        found.append(_ours(name, fp32 | settings, _OUR_PLAIN))
    return found


_PRESETS = {"default": _default, "best": _best, "guide": _guide, "levers": _levers, "lean": _lean}


def _asked(options: BenchOptions, text: str, precision: str, plain: str) -> list[Row]:
    """Our row of `LEVER=VALUE+LEVER=VALUE`, after Trainer's of the same settings if it has these.

    precision: where no other is asked for. plain: key of our row of that precision alone.
    """
    settings: dict[str, Any] = {"precision": "bf16" if "weight_dtype=bf16" in text.replace("-", "_") else precision}
    named = set[str]()
    for part in text.split("+"):
        if not part.strip():
            said = f"--rows has '{printable(text)}': a lever is missing beside +"
            raise OptionError(said, hint="as in --rows precision=bf16+optim=adafactor")
        name, _, value = part.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if name not in SETTINGS:
            known = did_you_mean(name, SETTINGS) or "the levers are " + ", ".join(SETTINGS)
            raise OptionError(f"--rows has '{printable(name)}', which is no lever", hint=known)
        if name in named:
            raise OptionError(f"--rows has {name} twice in '{printable(text)}'", hint="name each lever once")
        settings[name] = _value(name, value.strip())
        named.add(name)
    settings |= _pieces(settings, options.batch_size)
    _check(options, text, settings)
    theirs = trainers_settings(settings, options.batch_size)
    base = _HALF if precision == "bf16" and "precision" not in named else PLAIN
    trainer = [] if theirs is None else [Row(side="trainer", name=text, settings=theirs, base=base.key)]
    return [*trainer, _ours(text, settings, plain)]


def _check(options: BenchOptions, text: str, settings: Mapping[str, Any]) -> None:
    """Check settings of `--rows`. Raises: OptionError, which calls them as `--rows` does."""
    try:
        options.train_options(**settings)
    except OptionError as error:
        said, hint = (_NAMED.sub(_as_setting, each) for each in (str(error), error.hint or ""))
        raise OptionError(f"--rows has '{printable(text)}': {said}", hint=hint or None) from None


#: Options of train in a message.
_NAMED = re.compile(r"--(?:no-)?[a-z0-9]+(?:-[a-z0-9]+)*")


def _as_setting(found: re.Match[str]) -> str:
    """An option as `--rows` has it: `--late-clipping` is late_clipping."""
    name = found[0].removeprefix("--").replace("-", "_")
    return name if name in SETTINGS else found[0]


def _pieces(settings: Mapping[str, Any], batch_size: int) -> dict[str, int]:
    """Micro-batches of the rows that are asked for, where their number is not: the batch is the bench's."""
    rows = settings.get("per_device_batch_size")
    if rows is None or "gradient_accumulation_steps" in settings:
        return {}
    if rows < 1 or batch_size % rows:
        said = f"--rows has per_device_batch_size={rows}, which does not divide --batch-size {batch_size}"
        raise OptionError(said, hint=f"as in --rows per_device_batch_size={_quarters(batch_size)[0]}")
    return {"gradient_accumulation_steps": batch_size // rows}


def _value(name: str, text: str) -> Any:
    """A value of `--rows` in the type of its option."""
    hint = get_type_hints(TrainOptions)[name]
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    kind = next((kind for kind in (bool, int, float) if kind in kinds), str)
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        said = f"--rows has {name}={printable(text)}: it must be {wanted}"
        raise OptionError(said, hint=f"as in --rows {name}={'true' if kind is bool else 8}") from None


def trainers_settings(settings: Mapping[str, Any], batch_size: int) -> dict[str, Any] | None:
    """Settings of TrainingArguments that ask for the same; None where Trainer has no counterpart."""
    found: dict[str, Any] = {}
    left = dict(settings)
    precision = left.pop("precision", "fp32")
    if precision not in ("auto", "fp32", "tf32", "bf16", "fp16"):
        return None
    if precision not in ("auto", "fp32"):
        found[precision] = True
    if (rows := left.pop("per_device_batch_size", None)) is not None:
        left.pop("gradient_accumulation_steps", None)
        left.pop("token_budget", None)
        found |= _accumulated(rows, max(1, batch_size // rows))
    if left.pop("gradient_checkpointing", "none") not in ("none", "full"):
        return None
    if settings.get("gradient_checkpointing") == "full":
        found |= _CHECKPOINTS
    execution = left.pop("execution", "auto")
    if execution == "compiled":
        found["torch_compile"] = True
        if precision == "fp32":
            found["tf32"] = False  # which Trainer turns on with its compiler
    for name in _SAME:
        if name in left:
            found[name] = left.pop(name)
    return None if left else found


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as words, `none` without any."""
    shown = (f"{name}={value}" for name, value in settings.items() if name != "gradient_checkpointing_kwargs")
    return " ".join(shown) or "none"


def _ours(name: str, settings: Mapping[str, Any], base: str) -> Row:
    return Row(side="brimful", name=name, settings=settings, base=base)


def _quarters(batch_size: int) -> tuple[int, int]:
    """Rows of a micro-batch, and micro-batches of a batch that is split in four, or into single rows."""
    pieces = 4 if batch_size % 4 == 0 else batch_size
    return batch_size // pieces, pieces


def _accumulated(micro: int, pieces: int) -> dict[str, Any]:
    return {"per_device_train_batch_size": micro, "gradient_accumulation_steps": pieces}


def _with_needs(row: Row, on_gpu: bool) -> Row:
    """The row with the setting that only a GPU has; on a GPU, ours with captured steps where it says nothing else."""
    settings = row.settings
    half = settings.get("precision") in ("fp16", "tf32", "fp8") or settings.get("fp16") or settings.get("tf32") is True
    need = None
    if half:
        need = str(settings.get("precision") or ("fp16" if settings.get("fp16") else "tf32"))
    elif settings.get("execution") in ("captured", "compiled") or settings.get("torch_compile"):
        need = "compiled steps" if row.side == "trainer" else f"{settings['execution']} steps"
    elif settings.get("gradient_checkpointing") == "offload":
        need = "activations in host memory"
    elif settings.get("optimizer_offload"):
        need = "states in host memory"
    elif settings.get("allocator", "default") != "default":
        need = "segments of a GPU's memory"
    if on_gpu and row.side == "brimful" and "execution" not in settings:
        settings = {**settings, "execution": "captured"}
    return Row(side=row.side, name=row.name, settings=settings, base=row.base, needs_gpu=need)
