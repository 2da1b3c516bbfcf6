"""Checks of options, and how flags are spelt."""

from __future__ import annotations

import codecs
import dataclasses
import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from brimful.core.errors import OptionError, did_you_mean, encodes, printable
from brimful.core.units import parse_bytes

_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False", type(None): "nothing"}
#: Letters that tell choices which begin with them from others, and choices that a hint names.
_FEWEST_LETTERS, _MOST_NEAR = 3, 3
#: Beginnings of names of optimizers that transformers has, and these commands do not.
_NO_OPTIMIZERS = ("galore", "apollo", "lomo", "adalomo", "grokadamw", "stable_adamw")


def check_types(options: object) -> None:
    """Check each field against its annotation, for Python calls; the command line has converted types already."""
    hints = get_type_hints(type(options))
    for field in dataclasses.fields(cast(Any, options)):
        hint, value = hints[field.name], getattr(options, field.name)
        kinds = get_args(hint) or (hint,)
        if get_origin(hint) is Literal:
            fits, wanted = value in kinds, f"one of {', '.join(map(str, kinds))}"
        elif get_origin(hint) is tuple:
            fits, wanted = all(isinstance(each, str) for each in value), "texts"
            for each in value if fits else ():
                _check_text(flag(field.name), each)
        else:
            accepted = (*kinds, int) if float in kinds else kinds
            fits = isinstance(value, accepted) and (bool in kinds or not isinstance(value, bool))
            wanted = " or ".join(_KINDS[kind] for kind in kinds)
            if isinstance(value, str):
                _check_text(flag(field.name), value)
        if not fits:
            near = _near(value, kinds) if get_origin(hint) is Literal and isinstance(value, str) else None
            raise refused(options, field.name, repr(value), wanted, hint=_in_transformers(field.name, value) or near)


def _in_transformers(name: str, value: object) -> str | None:
    """Hint for a value that an option has in transformers, and not here."""
    if name == "gradient_checkpointing" and str(value).lower() in ("true", "false"):
        return f"{'full' if str(value).lower() == 'true' else 'none'} is transformers' gradient_checkpointing={value}"
    if name == "optim" and str(value).startswith(_NO_OPTIMIZERS):
        return "it is in transformers alone; adafactor, adamw_8bit and --peft lora save memory, too"
    return None


def _near(value: str, choices: Sequence[Any]) -> str | None:
    """Hint with the choices that a value begins, or else the one that it resembles."""
    bare = value.lower().replace("-", "_")
    begun = [each for each in choices if len(bare) >= _FEWEST_LETTERS and str(each).startswith(bare)][:_MOST_NEAR]
    if len(begun) > 1:
        return f"did you mean {', '.join(begun[:-1])} or {begun[-1]}?"
    return did_you_mean(value, begun or [str(each) for each in choices])


def _check_text(name: str, value: str) -> None:
    """Check that a text is UTF-8 without NUL: it may be a file name."""
    if not encodes(value):
        raise OptionError(f"{name} is '{printable(value)}': it is not UTF-8", hint="use another name")
    if "\0" in value:
        raise OptionError(f"{name} is '{printable(value)}': it has a NUL in it", hint="remove it")


def split_names(names: str) -> tuple[str, ...]:
    """The names in `text, label`."""
    return tuple(name.strip() for name in names.split(","))


def check_header(header: bool | None, column_names: str | None) -> None:
    """Check that --header and --column-names agree, and that names are names."""
    if column_names is None:
        return
    if header:
        raise OptionError("--header and --column-names are both given", hint="give one of them")
    names = split_names(column_names)
    if "" in names:
        said = f"--column-names is '{printable(column_names)}': a name is empty"
        raise OptionError(said, hint="name all columns, separated by commas: --column-names text,label")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise OptionError(f"--column-names has '{printable(twice)}' twice", hint="give each column a name of its own")


#: Names of characters that are hard to type.
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "\\t": "\t", "pipe": "|", "space": " "}


def check_text_format(delimiter: str | None, encoding: str | None) -> None:
    """Check that --delimiter is one character, and that --encoding is known."""
    if delimiter is not None:
        character = DELIMITERS.get(delimiter, delimiter)
        if len(character) != 1 or not character.isascii() or character in '"\r\n' or character.isalnum():
            said = f"--delimiter is '{printable(delimiter)}': it must be one character, and no letter or quotation mark"
            raise OptionError(said, hint="as in --delimiter ';' or --delimiter tab")
    if encoding is not None and not _is_text_encoding(encoding):
        said = f"--encoding is '{printable(encoding)}': no such encoding is known"
        raise OptionError(said, hint="as in --encoding windows-1252, latin-1, utf-16, gb18030 or shift_jis")


def _is_text_encoding(name: str) -> bool:
    try:
        "a".encode(name)  # refuses codecs that are no encodings of text, such as base64
        return codecs.getincrementaldecoder(name) is not None
    except (LookupError, ValueError):
        return False


def check_positive(options: object, *names: str) -> None:
    """Check that these fields are finite and greater than 0, where they are given."""
    check_numbers(options, names, lambda value: 0 < value < float("inf"), "finite and greater than 0")


def check_numbers(options: object, names: Sequence[str], fits: Callable[[float], bool], wanted: str) -> None:
    """Check that these fields fit, where they are given. wanted: what they must be, for the message."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not fits(value):
            raise refused(options, name, value, wanted)


def refused(options: object, name: str, value: object, wanted: str, *, hint: str | None = None) -> OptionError:
    """The error about the value of a field; without a hint, its default is one."""
    if hint is not None:
        return OptionError(f"{flag(name)} is {printable(value)}: it must be {wanted}", hint=hint)
    default = next(field.default for field in dataclasses.fields(cast(Any, options)) if field.name == name)
    if default is None or default is dataclasses.MISSING:
        hint = "leave it out, or see --help" if default is None else "see --help"
    else:
        hint = f"the default is {default}"
    return OptionError(f"{flag(name)} is {printable(value)}: it must be {wanted}", hint=hint)


def check_size(options: object, name: str) -> None:
    """Check that a field is a size greater than 0, as 8GB, where it is given."""
    value = getattr(options, name)
    if value is None:
        return
    try:
        fits = parse_bytes(value) > 0
    except ValueError:
        fits = False
    if not fits:
        raise refused(options, name, value, "a size, as 8GB, 7.5GiB or 500MB")


def check_checkpointing(options: Any) -> None:
    """Check that --gradient-checkpointing is known, and that --activation-memory has one that it limits."""
    given, memory = options.gradient_checkpointing, options.activation_memory
    if not re.fullmatch(r"none|full|selective|offload|every-[1-9]\d{0,5}", given):
        wanted = "none, full, selective, offload, or every-N as every-2"
        raise refused(
            options, "gradient_checkpointing", given, wanted, hint=_in_transformers("gradient_checkpointing", given)
        )
    if memory is not None and given not in ("selective", "offload"):
        raise OptionError(
            f"--activation-memory is given, and --gradient-checkpointing is {given}",
            hint="add --gradient-checkpointing selective, or offload",
        )


#: Names of AdamW in fp32.
ADAMW = ("adamw_torch", "adamw_torch_fused")


def adamw_kernels(optim: str, optim_args: str | None) -> dict[str, bool]:
    """The kernels of torch that --optim-args asks for, as torch.optim.AdamW takes them; empty for the fastest there
    are, and for other optimizers. Raises: OptionError."""
    if optim not in ADAMW or not optim_args:
        return {}
    pairs = [part.replace(" ", "").partition("=") for part in optim_args.split(",")]
    given = {name: value.lower() == "true" for name, _, value in pairs if value.lower() in ("true", "false")}
    said = f"--optim-args is {printable(optim_args)}, and --optim {optim} takes"
    if len(given) != len(pairs) or not given.keys() <= {"foreach", "fused"}:
        raise OptionError(
            f"{said} only foreach and fused, each True or False",
            hint="AdamW's settings are --adam-beta1, --adam-beta2, --adam-epsilon and --weight-decay",
        )
    if given.get("foreach") and given.get("fused"):
        raise OptionError(f"{said} one of the two", hint="give foreach=True or fused=True")
    if optim == "adamw_torch_fused" and given != {"fused": True}:
        raise OptionError(f"{said} only fused=True", hint="add --optim adamw_torch")
    return given


#: Options that only AdamW's update has.
ADAMW_ONLY = ("optimizer_in_backward", "optimizer_offload", "optimizer_state_dtype", "weight_dtype", "stream_weights")


#: Options that parts of weights cut by --tensor-parallel do not go with.
_NOT_CUT = (*ADAMW_ONLY, "peft", "optim_args", "activation_memory", "reduce_dtype")


#: Settings of optimizers that the run sets, by its own options.
_ARGS_OF_THEIR_OWN = {"lr": "--learning-rate", "weight_decay": "--weight-decay"}


def check_update(options: Any) -> None:
    """Check that ways to update in less memory go together."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    asked = [name for name in ADAMW_ONLY if getattr(options, name) != defaults[name]]
    if asked and options.optim not in ADAMW:
        raise OptionError(
            f"{flag(asked[0])} is for AdamW, and --optim is {options.optim}", hint="leave one of the two out"
        )
    if adamw_kernels(options.optim, options.optim_args) and asked:
        raise OptionError(
            f"--optim-args {printable(options.optim_args)} is for updates of all weights at once, and"
            f" {flag(asked[0])} updates a part at a time",
            hint="leave one of the two out",
        )
    parts = [part.strip() for part in (options.optim_args or "").split(",")] if options.optim_args else []
    if wrong := [part for part in parts if not re.fullmatch(r"[^=\s]+\s*=[^=]*[^=\s]", part)]:
        raise OptionError(
            f"--optim-args has '{printable(wrong[0])}', which is no name=value",
            hint="separate them by commas, as in momentum=0.9,nesterov=True",
        )
    names = {part.split("=")[0].strip() for part in parts}
    if own := [name for name in _ARGS_OF_THEIR_OWN if name in names]:
        raise OptionError(
            f"{own[0]} in --optim-args has no effect", hint=f"it is an option of its own: {_ARGS_OF_THEIR_OWN[own[0]]}"
        )
    if options.late_clipping and not (options.optimizer_in_backward and options.max_grad_norm):
        raise OptionError(
            "--late-clipping is for --optimizer-in-backward with a --max-grad-norm above 0", hint="leave it out"
        )
    if options.optimizer_in_backward and options.max_grad_norm and not options.late_clipping:
        raise OptionError(
            f"--optimizer-in-backward updates weights before the norm of the whole gradient is known, and"
            f" --max-grad-norm is {options.max_grad_norm:g}",
            hint="add --max-grad-norm 0, or --late-clipping to clip by the norm of the step before",
        )


def check_sharding(options: Any) -> None:
    """Check that --sharding has its package, and --offload-folder a use."""
    if options.offload_folder is not None and options.sharding != "deepspeed":
        raise OptionError("--offload-folder is for --sharding deepspeed", hint="add it, or use --optimizer-offload")
    if options.sharding == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        said = "--sharding deepspeed needs DeepSpeed, which is not installed"
        raise OptionError(said, hint="pip install 'brimful[deepspeed]', or use --sharding parameters")


def check_tensor_parallel(options: Any) -> None:
    """Check that --tensor-parallel is a number, fits the processes that are asked for, and goes with the other ways to
    keep less."""
    check_positive(options, "tensor_parallel")
    size = options.tensor_parallel
    if size == 1:
        return
    for name, count in (("gpus", options.gpus), ("num_processes", options.num_processes)):
        if count not in (None, "all") and int(count) % size:
            raise OptionError(
                f"--tensor-parallel is {size}, and {flag(name)} is {count}: it must be a multiple of it",
                hint=f"as in {flag(name)} {size}",
            )
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    besides = {"sharding": ("auto", "none")} | {name: (defaults[name],) for name in _NOT_CUT}
    if asked := next((name for name, plain in besides.items() if getattr(options, name) not in plain), None):
        raise OptionError(
            f"--tensor-parallel {size} and {flag(asked)} {getattr(options, asked)} are both given, and do not work"
            " together",
            hint="leave one of the two out",
        )


def check_streaming(options: Any) -> None:
    """Check that --stream-folder has a use, and that nothing else is to keep activations of streamed layers."""
    if options.stream_folder is not None and options.stream_weights != "disk":
        raise OptionError(
            "--stream-folder is for --stream-weights disk", hint="add --stream-weights disk, or leave it out"
        )
    checkpointing = getattr(options, "gradient_checkpointing", "none")
    if options.stream_weights != "none" and checkpointing not in ("none", "full"):
        raise OptionError(
            f"--stream-weights {options.stream_weights} computes every layer again in the backward pass, and"
            f" --gradient-checkpointing is {checkpointing}",
            hint="leave one of the two out",
        )


def check_claim(options: Any) -> None:
    """Check that --claim has files to share and a folder for their results, and --lease a use."""
    if not options.claim:
        if options.lease != type(options).lease:
            raise OptionError("--lease is for --claim", hint="add --claim, or leave it out")
        return
    if options.output is None or options.data == "-":
        raise OptionError(
            "--claim shares files, and keeps results of each", hint="give an INPUT and an --output folder"
        )
    for name in ("limit", "max_errors"):
        if getattr(options, name) is not None:
            hint = (
                "leave one of the two out; the column `error` has the reasons"
                if name == "max_errors"
                else "leave it out"
            )
            raise OptionError(f"{flag(name)} counts rows of all files, and --claim has each done by itself", hint=hint)


def check_gpus(gpus: str | None, device: str) -> None:
    """Check that --gpus is `all` or a number above 0, and goes with the device."""
    if gpus is None:
        return
    if gpus != "all" and not (gpus.isascii() and gpus.isdigit() and int(gpus) > 0):
        raise OptionError(f"--gpus is '{printable(gpus)}': it must be all, or 1 or more", hint="as in --gpus 2")
    if device == "cpu":
        hint = "leave one out; torchrun --nproc-per-node 2 -m brimful ... starts two processes on a CPU"
        raise OptionError(f"--gpus {gpus} and --device cpu are both given", hint=hint)


def check_launcher(options: Any) -> None:
    """Check that --num-processes has a launcher, and --launcher what it needs."""
    check_positive(options, "num_processes")
    if options.launcher == "none":
        if options.num_processes is not None:
            raise OptionError(
                "--num-processes is for --launcher ray", hint="add it; without Ray, --gpus N, or start with torchrun"
            )
        return
    if options.gpus is not None:
        raise OptionError(
            f"--gpus and --launcher {options.launcher} are both given",
            hint="--num-processes says how many: each has a GPU",
        )
    if options.output is None or options.data in (None, "-"):
        raise OptionError(f"--launcher {options.launcher} starts processes elsewhere", hint="give INPUT, and --output")


def effective_batch(options: Any, default: int) -> int:
    """The effective batch size: as given, or the product of micro-batch and accumulation. default: of batch_size.

    Raises: OptionError if both are given and differ.
    """
    rows, times, given = options.per_device_batch_size, options.gradient_accumulation_steps, int(options.batch_size)
    if rows is None:
        if times is not None:
            raise OptionError(
                "--gradient-accumulation-steps is given without --per-device-batch-size",
                hint="give both: their product is the effective batch; or --batch-size, which is split as it fits",
            )
        return given
    product = int(rows * (times or 1))
    if given not in (default, product):
        raise batch_conflict(given, product)
    return product


def batch_conflict(given: int | str, product: int) -> OptionError:
    """The error about an effective batch that is said in two ways."""
    return OptionError(
        f"--batch-size is {given}, and --per-device-batch-size x --gradient-accumulation-steps is {product}",
        hint="leave --batch-size out: the product is the effective batch",
    )


def flag(field: str) -> str:
    """`batch_size` as typed on the command line: `--batch-size`."""
    return "--" + field.replace("_", "-")
