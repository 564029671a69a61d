"""Keys of groups train, loss_scale and eval: steps, batches, which weights are trained, and how they are evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from platform.config.key import key, own_settings
from platform.plan.language.attention_kernels import AUTO, KERNELS
from platform.plan.language.functions import CROSS_ENTROPY


@dataclass
class Train:
    """Steps, batches, and what happens to a step whose numbers are wrong."""

    steps: int = key(100, "updates; the learning-rate schedule spans them", ">= 1")
    stop_at: int = key(0, "end after this step, with a checkpoint; 0 = run to train.steps", ">= 0")
    global_batch: int = key(16, "sequences per update, over all replicas", ">= 1", most=10**8)
    ramp_from: int = key(
        0, "sequences of the first updates, of a batch that grows; 0 = it does not", ">= 0", most=10**8
    )
    ramp_by: int = key(1, "train.ramp_from: sequences by which the batch grows, up to train.global_batch", ">= 1")
    ramp_samples: int = key(0, "train.ramp_from: sequences over which the batch grows", ">= 0")
    length_ramp: list[str] = key(
        [],
        "STEP:LENGTH, ...: after STEP updates, sequences of LENGTH tokens, up to model.length; [] = always these",
        pattern=r"\d{1,12}:\d{1,12}",
        constraint="must be STEP:LENGTH, such as 200:512",
    )
    microbatch: int = key(
        4, "sequences per microbatch of one data-parallel replica; -1: the planner chooses", ">= 1", most=10**6
    )
    init: str = key(
        "",
        "start from these weights: a checkpoint's URL, or a folder that transformers saved; random = from none;"
        ' "" = from model.source, if there is one',
    )
    loss: str = key("", 'what a label costs; "" = as the objective says', ("", CROSS_ENTROPY), open=True)
    init_averaged: bool = key(False, "train.init: take the averages that train.ema kept of that run's weights")
    spike: float = key(0.0, "a loss above this factor times the median of the last 32 is a spike; 0 = never", ">= 0")
    verify_every: int = key(0, "steps between comparisons of the replicas' weights and moments; 0 = never", ">= 0")
    compile: str = key("auto", "compile what lies between collectives; auto: on GPUs", ("auto", "on", "off"))
    attention_kernel: str = key(AUTO, "kernel of attention where one computes it; auto: torch chooses", KERNELS)
    mlp_chunks: int = key(
        1, "feed-forward layers: chunks of tokens, each with its inner activations, computed twice; 1 = whole, once",
        ">= 1", most=10**6,
    )  # fmt: skip
    freeze: list[str] = key(
        [],
        "patterns of parameters that no update changes, such as embedding or layers.[0-3].*",
        pattern=r"[\w.*?\[\]!-]+",
        constraint="must be the name of a parameter, or a pattern with *, ? or [...]",
    )
    ema: float = key(0.0, "decay of averaged weights, such as 0.999; 0 = none are kept", ">= 0 and < 1")
    deterministic: bool = key(False, "a step done again is equal in every bit; what cannot be is refused")
    loss_settings: dict[str, Any] = own_settings("loss")
    on_spike: str = key("rollback", "at a spike or non-finite number: redo, skip or stop", ("rollback", "skip", "stop"))


@dataclass
class LossScaling:
    """Factor on the loss under precision=fp16, so that small gradients do not vanish: falls at an overflow."""

    initial: float = key(2.0**16, "of the first step", "> 0")
    growth: float = key(2.0, "rises by this factor after loss_scale.growth_every updates", ">= 1", most=2.0**20)
    growth_every: int = key(2000, "updates without a change after which it rises", ">= 1")
    backoff: float = key(0.5, "falls by this factor when a gradient overflows; that step is skipped", "> 0 and < 1")
    least: float = key(1.0, "does not fall below; what overflows then is met as train.on_spike says", "> 0")


@dataclass
class Eval:
    """Evaluation on the held-out split."""

    every: int = key(0, "steps between evaluations of the validation loss; 0 = never", ">= 0")
    batches: int = key(4, "global batches of the held-out split per evaluation", ">= 1", most=10**6)
    averaged: bool = key(False, "evaluate the averaged weights of train.ema instead of the trained ones")
    patience: int = key(0, "evaluations in a row without a lower loss after which the run ends; 0 = never", ">= 0")
    least_gain: float = key(0.0, "eval.patience: the loss must fall by more than this to be lower", ">= 0")
    prompts: list[str] = key([], "texts that the model continues, or answers, at each evaluation, to be read")
    prompt_tokens: int = key(
        32, "eval.prompts: tokens of each continuation, each a pass of the model", ">= 1", most=10**4
    )
    tasks: list[str] = key([], "tasks of lm-eval, such as [lambada_openai], that score the model at each evaluation")
    task_folder: str = key("", "eval.tasks: a folder with task files of your own")
    task_samples: int = key(0, "eval.tasks: documents of each task; 0 = all", ">= 0")
