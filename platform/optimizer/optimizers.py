"""Optimizers by name: how to make one, the state it keeps per parameter, and what it needs whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from platform.config.extending.own_settings import admit, with_settings
from platform.config.fields import Config, Optimizer
from platform.optimizer.scratch import Update, scratch_of_adafactor, scratch_of_muon

if TYPE_CHECKING:
    import torch  # at run time only where used: planning reads OPTIMIZERS and must not wait for torch's import


ELEMENT = "element"
FEWEST_DIMS = {"tensor": 1, "matrix": 2}  # need -> parameters of at least so many dims must be whole
Need = str | Callable[[Optimizer], str]


@dataclass(frozen=True)
class OptimizerKind:
    """Entry of OPTIMIZERS. `make(groups, config.optimizer)` returns a torch optimizer of parameter groups [{"params",
    "names", "weight_decay", "lr_factor", "matrix"}]; the params are local blocks or shards, whole tensors where `needs`
    says so. `moments`: numbers of state per element of a parameter, or a function that finds it. `divides`: True if
    they divide gradients in fp32 by their attribute `grad_scale` (fp32 scalar) while they read them, as torch's fused
    optimizers do for its GradScaler. `scratch`: bytes that an update takes for a time. `needs`: the parts that
    are updated as a whole, or a function that finds them: every `element` by itself, every `tensor`, or each tensor of
    two or more dims (`matrix`). Muon gets what it needs whole: the plan gathers it (`Plan.matrices`); Adafactor what it
    needs summed (`Plan.factored`)."""

    make: Callable[..., torch.optim.Optimizer]
    moments: int | Callable[[Optimizer], int]
    divides: bool = False
    scratch: Callable[[Optimizer, Update], int] = lambda o, update: 0
    needs: Need = ELEMENT


def _adamw(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct torch's fused AdamW of parameter groups, by config.optimizer `o`."""
    import torch

    return torch.optim.AdamW(groups, o.lr, (o.betas[0], o.betas[1]), o.eps, fused=True)


def _sgd(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct torch's fused SGD of parameter groups; as there, weight decay is added to the gradient."""
    import torch

    return torch.optim.SGD(groups, o.lr, o.momentum, nesterov=o.nesterov, fused=True)


def _lion(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct the Lion optimizer of parameter groups, by config.optimizer `o`."""
    from platform.optimizer.lion import Lion

    return Lion(groups, o.lr, (o.betas[0], o.betas[1]))


def _muon(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct the Muon optimizer of parameter groups; groups with `matrix` set hold parts of whole matrices."""
    from platform.optimizer.muon import Muon

    return Muon(groups, o)


def _adafactor(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct the Adafactor optimizer of parameter groups, by config.optimizer `o`."""
    from platform.optimizer.adafactor import Adafactor

    return Adafactor(groups, o)


OPTIMIZERS = {
    "adamw": OptimizerKind(_adamw, moments=2, divides=True),
    "sgd": OptimizerKind(_sgd, moments=lambda o: int(o.momentum > 0), divides=True),
    "lion": OptimizerKind(_lion, moments=1, scratch=lambda o, update: update.largest),
    "muon": OptimizerKind(_muon, moments=2, scratch=scratch_of_muon),  # one of matrices
    "adafactor": OptimizerKind(_adafactor, moments=1, scratch=scratch_of_adafactor),  # none of matrices, but SIDES
}


SHIPPED = dict(OPTIMIZERS)  # as they are here, whatever a module registers under their names
NOT_OF_MATRICES = "exp_avg_sq"  # the moment that is not kept of the plan's `matrices`
NOT_OF_FACTORED = "variance"  # the moment of whose place SIDES, one per row and one per column, take in `factored`
SIDES = ("row_var", "col_var")
AVERAGE = "ema"  # kind of the averaged weights, which are kept like a moment


def kept_numbers(config: Config) -> int:
    """Return the numbers of optimizer state per trained element: moments, and one more for averaged weights."""
    moments = OPTIMIZERS[config.optimizer.kind].moments
    return (moments if isinstance(moments, int) else moments(config.optimizer)) + (config.train.ema > 0)


def make_optimizer(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    """Construct the torch optimizer that config.optimizer `o` names, of parameter groups."""
    made: torch.optim.Optimizer = with_settings(OPTIMIZERS[o.kind].make, "optimizer.kind", o.kind, o.settings)(
        groups, o
    )
    return made


def state_of(o: Optimizer, dtype: torch.dtype, device: torch.device) -> tuple[list[str], dict[str, Any]]:
    """Return what the configured optimizer keeps per parameter of `dtype`: the names of its moments (tensors of the
    parameter's shape), and its other state by name with the values after one step; for snapshots and checkpoints. Found
    by taking a step on two dummy elements."""
    import torch

    w = torch.zeros(2, dtype=dtype, device=device, requires_grad=True)
    w.grad = torch.zeros_like(w)
    optimizer = make_optimizer([{"params": [w], "weight_decay": 0.0}], o)
    optimizer.step()
    found = {name: value for name, value in optimizer.state[w].items() if value is not None}
    moments = [name for name, value in found.items() if isinstance(value, torch.Tensor) and value.shape == w.shape]
    return moments, {name: value for name, value in found.items() if name not in moments}


def find_need(o: Optimizer) -> str:
    """Find by trial whether the configured optimizer, registered without `needs`, updates parts of a matrix as it does
    the whole matrix: return `element` if so, else `tensor` (it must see every tensor whole). It takes three steps each
    on the whole matrix, on blocks of rows and on flat parts."""
    import torch

    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 4, generator=draw, dtype=torch.float64) for _ in range(4)]

    def updated(cut: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Return a matrix in the parts that `cut` makes, after three optimizer steps with gradients cut alike."""
        start, *gradients = (cut(value.clone()) for value in values)
        parts = [part.requires_grad_() for part in start]
        optimizer = make_optimizer([{"params": parts, "weight_decay": 0.1}], o)
        for gradient in gradients:
            for part, of_part in zip(parts, gradient, strict=True):
                part.grad = of_part
            optimizer.step()
        return [part.detach() for part in parts]

    try:
        whole = updated(lambda x: [x])[0]
        rows = torch.cat(updated(lambda x: [part.contiguous() for part in x.split(2)]))
        flat = torch.cat(updated(lambda x: [part.clone() for part in x.flatten().split(8)])).view_as(whole)
    except Exception:  # the optimizer refuses such parts
        return "tensor"
    return ELEMENT if torch.allclose(whole, rows) and torch.allclose(whole, flat) else "tensor"


def keeps_groups(o: Optimizer) -> bool:
    """Return True if the configured optimizer keeps the parameter groups that it is given, with their own factors on
    the learning rate. One that a user registered is tried, as it may put all of its parameters into one group."""
    if OPTIMIZERS[o.kind] is SHIPPED.get(o.kind):
        return True
    import torch

    alike = {"weight_decay": 0.0, "matrix": False}
    groups = [{"params": [torch.zeros(2, requires_grad=True)], "names": [f"{x}"], "lr_factor": x} for x in (1.0, 0.5)]
    made = make_optimizer([{**group, **alike} for group in groups], o)
    return [group.get("lr_factor") for group in made.param_groups] == [1.0, 0.5]


def preload_imports(o: Optimizer) -> None:
    """Take a dummy optimizer step, so that a spare worker has made torch's slow imports before a run needs it."""
    import torch

    state_of(o, torch.float32, torch.device("cpu"))


def register_optimizer(
    name: str,
    make: Callable[..., torch.optim.Optimizer],
    moments: int,
    needs: str | None = None,
    settings: type | None = None,
) -> None:
    """Register an optimizer as `optimizer.kind=NAME`; `make` and `moments` as in `OptimizerKind`. `needs`: `element` if
    it updates every element by itself, `tensor` if it must see every tensor whole, `matrix` if only tensors of two or
    more dims; found by trying (`find_need`) if None. A plan that would split a tensor that it needs whole is refused.
    `settings`: a dataclass of optimizer.settings, which `make` gets as `settings`. Raises ValueError for any other
    value of `needs`."""
    if needs not in (None, ELEMENT, *FEWEST_DIMS):
        raise ValueError(f"needs={needs!r}: must be {ELEMENT}, {' or '.join(FEWEST_DIMS)}")
    admit("optimizer.kind", name, settings, make)
    OPTIMIZERS[name] = OptimizerKind(make, moments, needs=needs or find_need)
