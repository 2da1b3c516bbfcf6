"""Reasons for which a Trainer's own training step runs, and not ours: what a subclass, an argument or a batch asks for.

Each is one line. What is not named here is asked of the loop around the step, which is Trainer's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from brimful.core.errors import OptionError
from brimful.integrations.left_padding import is_on_the_left, left_is_right
from brimful.integrations.module_hooks import COMPLETE, foreign_hook, hooked_gradient
from brimful.integrations.problem_type import has_own_loss, problem_of
from brimful.integrations.replaced_parts import replaced_part
from brimful.models.end_tokens import end_token_of
from brimful.models.hub.adapters import unwrapped

#: Methods whose overriding may be of the loss, or of how it is computed.
_OF_THE_STEP = (
    *("compute_loss", "training_step", "compute_loss_context_manager", "autocast_smart_context_manager"),
    *("get_batch_samples", "_prepare_inputs", "_prepare_input", "_get_num_items_in_batch"),
)
#: Methods by which Trainer updates; where one is overridden, gradients are left to it.
_OF_THE_UPDATE = ("create_optimizer", "get_optimizer_cls_and_kwargs", "_clip_grad_norm", "_get_grad_norm")
#: Events at which callbacks see gradients.
_BETWEEN = ("on_pre_optimizer_step", "on_optimizer_step")
#: Arguments of a batch that the step reads.
_READ = frozenset({"input_ids", "attention_mask", "token_type_ids", "labels"})
#: Optimizers that update within the backward pass.
_IN_BACKWARD = ("lomo", "adalomo", "layerwise")


def reason_of_trainer(trainer: Any, ours: type[Any]) -> str | None:
    """Return why a Trainer trains by its own step, as far as it says without a model and a batch. ours: our class."""
    for name in _OF_THE_STEP:
        stock = getattr(ours, name, None)
        if name in vars(trainer) or getattr(type(trainer), name, None) is not stock:
            return f"{name} is overridden"
    args = trainer.args
    optimizer = str(getattr(args.optim, "value", args.optim))
    asked: list[tuple[Any, str]] = [
        (trainer.compute_loss_func, "compute_loss_func is given"),
        (args.n_gpu > 1, "DataParallel trains on several GPUs; CUDA_VISIBLE_DEVICES=0 chooses one"),
        (trainer.is_deepspeed_enabled, "deepspeed is asked for"),
        (trainer.is_fsdp_enabled, "fsdp is asked for"),
        (args.world_size > 1 and not _by_ddp(trainer), "processes train otherwise than by DistributedDataParallel"),
        (args.fp16, "fp16's loss scale is Accelerate's; bf16=True runs by ours"),
        (args.torch_compile, "torch_compile is asked for; ours compiles without it"),
        (args.neftune_noise_alpha is not None, "NEFTune adds noise in a hook"),
        (getattr(args, "use_liger_kernel", False), "Liger's kernels are asked for"),
        (args.torch_empty_cache_steps is not None, "torch_empty_cache_steps is asked for"),
        (any(name in optimizer for name in _IN_BACKWARD), "the optimizer updates within the backward pass"),
        (args.device.type not in ("cpu", "cuda"), f"it trains on {args.device.type}"),
    ]
    return next((why for is_asked, why in asked if is_asked), None)


def reason_of_update(trainer: Any, ours: type[Any]) -> str | None:
    """Return why Trainer's loop clips and updates by itself, as far as it says without a model. ours: our class."""
    for name in _OF_THE_UPDATE:
        if name in vars(trainer) or getattr(type(trainer), name, None) is not getattr(ours, name, None):
            return f"{name} is overridden"
    for callback in trainer.callback_handler.callbacks:
        for name in _BETWEEN:
            if name in vars(callback) or getattr(type(callback), name, None) is not getattr(TrainerCallback, name):
                return f"{type(callback).__name__} has {name}"
    return None


def _by_ddp(trainer: Any) -> bool:
    """True if each process has all of the model, and rows of its own."""
    accelerator = trainer.accelerator
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    return kind in ("MULTI_GPU", "MULTI_CPU") and getattr(accelerator, "parallelism_config", None) is None


def reason_of_model(model: Any) -> str | None:
    """Return why a model is trained by Trainer's own step; None if ours can be tried."""
    try:
        inner = unwrapped(model)
    except OptionError as refused:
        return str(refused)
    if type(inner).__name__ not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values():
        return f"{type(inner).__name__} is not a sequence classifier of transformers"
    if (own := replaced_part(model)) is not None:
        return own
    if getattr(inner, "is_quantized", False):
        return "its weights are quantized"
    dtypes = {p.dtype for p in inner.parameters()}
    if dtypes != {torch.float32}:
        other = next(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype != torch.float32)
        return f"weights are in {other}, and a step of ours keeps fp32; load the model with dtype=torch.float32"
    if (hook := foreign_hook(model.modules())) is not None:
        return f"there is a hook on its modules ({hook}), which no replayed step calls"
    if (hooked := hooked_gradient(model, COMPLETE)) is not None:
        return f"a hook is called when the gradient of {hooked} is complete, and a step of ours sums several passes"
    if replaced := [name for name, part in inner.named_modules() if part is not inner and "forward" in vars(part)]:
        return f"the forward of {replaced[0]} was replaced, and a step of ours gives it packed rows"
    return None


def reason_of_batch(inputs: Any, model: Any, *, smooths: bool) -> str | None:
    """Return why a batch runs by Trainer's own step; None if ours gives its gradient.

    model: the classifier. smooths: whether labels are smoothed. Raises: OptionError for labels that no loss takes.
    """
    if not isinstance(inputs, Mapping):
        return f"a batch is a {type(inputs).__name__}"
    given = {name: value for name, value in inputs.items() if value is not None}
    if missing := next((name for name in ("input_ids", "labels") if name not in given), None):
        return f"a batch has no {missing}"
    if others := sorted(set(given) - _READ):
        return f"a batch has {others[0]}"
    if "attention_mask" not in given:
        return "the collator returns no attention_mask, so padding is text; DataCollatorWithPadding returns one"
    if not all(isinstance(value, Tensor) for value in given.values()) or given["input_ids"].ndim != 2:
        return "a batch is not of padded tensors"
    mask_BL = given["attention_mask"]
    if mask_BL.ndim != 2:
        return "attention_mask is not of a number for each token"
    if bool((mask_BL[:, 1:] > mask_BL[:, :-1]).any()) or not bool(mask_BL[:, :1].all()):
        if not is_on_the_left(mask_BL):
            return "attention_mask leaves out tokens between others"
        if not left_is_right(model):
            return "the model reads padding on the left; the tokenizer's padding_side decides where it is"
    if (long := _beyond_its_positions(mask_BL, model)) is not None:
        return long
    if (elsewhere := _read_elsewhere(given["input_ids"], mask_BL, model)) is not None:
        return elsewhere
    if has_own_loss(model.config, given["labels"]):
        return f"{type(model).__name__} computes a loss of its own where problem_type is not set and labels are floats"
    if smooths and problem_of(model.config, given["labels"]) != "single_label_classification":
        return "label smoothing of Trainer is of single labels"
    if bool((given["labels"] == -100).any()):
        return "labels of -100 leave rows out of the loss"
    return None


def _read_elsewhere(ids_BL: Tensor, mask_BL: Tensor, model: Any) -> str | None:
    """Return that a head which looks for end tokens reads a row elsewhere than at its end, or refuses the batch."""
    if (end_id := end_token_of(model)) is None:
        return None
    ends_BL = (ids_BL == end_id) & (mask_BL != 0)
    ends_B, last_B1 = ends_BL.sum(dim=1), (mask_BL != 0).sum(dim=1, keepdim=True) - 1
    if bool(ends_BL.gather(1, last_B1).all()) and bool((ends_B == ends_B[:1]).all()):
        return None
    return (
        f"rows go on after their end token ({end_id}), or have different numbers of it, and the model's head reads it"
    )


def _beyond_its_positions(mask_BL: Tensor, model: Any) -> str | None:
    """Return that a row is longer than the configuration says, of a model whose positions are angles: it reads it."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or not 0 < limit < mask_BL.shape[1]:
        return None
    longest = int((mask_BL != 0).sum(dim=1).max())
    if longest <= limit or not any(type(each).__name__.endswith("RotaryEmbedding") for each in model.modules()):
        return None
    return f"a row has {longest:,} tokens, and max_position_embeddings of the model is {limit:,}"
