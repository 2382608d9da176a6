"""Who runs the delta rule: chosen by where the tensors are when it is called, never by which packages are installed."""

import importlib.util
import os

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hydralens.errors import InputError, check_word
from hydralens.hybrid.recurrence import gated_delta_rule

VARIABLE = "HYDRALENS_GDN"
NEEDS_FLA = 'Gated DeltaNet on a GPU needs fla: pip install "fla-core>=0.6,<0.7" (or say HYDRALENS_GDN=torch, correct but slow)'


def gdn_backend(device: torch.device, wanted: str = "auto") -> str:
    """``"torch"`` or ``"fla"``. The environment's ``HYDRALENS_GDN`` wins over ``wanted``.

    Raises:
        InputError: ``auto`` on a GPU without fla, fla on a CPU, or an unknown word.
    """
    wanted = os.environ.get(VARIABLE, wanted)
    check_word(VARIABLE, wanted, ("auto", "torch", "fla"))
    if wanted == "torch" or (wanted == "auto" and device.type == "cpu"):
        return "torch"
    if device.type == "cpu":
        raise InputError(f"{VARIABLE}=fla, but the model is on the CPU, where fla's kernels do not run; use auto or torch")
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
        raise InputError(NEEDS_FLA)
    return "fla"


def delta_rule(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head"],
    beta: Float[Tensor, "batch pos head"],
    *,
    initial_state: Float[Tensor, "batch head d_k d_v"] | None,
    cu_seqlens: Int[Tensor, "n"] | None,
    backend: str,
) -> tuple[Float[Tensor, "batch pos head d_v"], Float[Tensor, "batch head d_k d_v"]]:
    """``recurrence.gated_delta_rule`` on the chosen backend (``gdn_backend``)."""
    if gdn_backend(q.device, backend) == "torch":
        return gated_delta_rule(q, k, v, log_decay, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    # Keywords only: the two functions take their arguments in different orders.
    if q.shape[1] == 1 and not torch.is_grad_enabled():
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as kernel
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    return kernel(q=q, k=k, v=v, g=log_decay, beta=beta, scale=1.0, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens)
