"""Who runs the delta rule and attention over packed documents: chosen by where the tensors are when it is called, never by which packages are installed."""

import importlib.util
import os
import re
from importlib.metadata import version
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from hydralens.errors import InputError, check_word
from hydralens.hybrid.recurrence import gated_delta_rule
from hydralens.models.attention import attend

VARIABLE = "HYDRALENS_GDN"
FIRST_BROKEN, FIRST_MENDED = (3, 4, 0), (3, 7, 1)  # Triton: between them fla refuses this backward on Hopper, where it was miscompiled
NEEDS_FLA = 'Gated DeltaNet on a GPU needs fla: pip install "fla-core>=0.6,<0.7" (or say HYDRALENS_GDN=torch, correct but slow)'


def gdn_backend(device: torch.device, wanted: str = "auto") -> str:
    """``"torch"`` or ``"fla"``. The environment's ``HYDRALENS_GDN`` wins over ``wanted``.

    Raises:
        InputError: ``auto`` on a GPU without fla, fla on a CPU, or an unknown word.
    """
    wanted = os.environ.get(VARIABLE, wanted)
    check_word(VARIABLE, wanted, ("auto", "torch", "fla"))
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return "torch"
    if device.type != "cuda":
        raise InputError(f"{VARIABLE}=fla, but the model is on {device.type}, where fla's kernels do not run; use auto or torch")
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None:
        raise InputError(NEEDS_FLA)
    return "fla"


def cannot_train(triton: str, capability: tuple[int, int]) -> str | None:
    """Why fla's backward would refuse to run with this Triton on a GPU of this compute capability; None where it runs."""
    release = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    if capability[0] != 9 or not FIRST_BROKEN <= release < FIRST_MENDED:
        return None
    return f"fla refuses the backward of Gated DeltaNet on Hopper with Triton {triton}; pip install 'triton>=3.7.1', or train with {VARIABLE}=torch"


def doctor_line() -> str:
    """What runs the recurrence of linear heads on this machine, and whether it trains."""
    if not torch.cuda.is_available():
        return "torch, chunk by chunk: there is no GPU"
    try:
        backend = gdn_backend(torch.device("cuda"))
    except InputError as error:
        return str(error)
    reason = None if backend == "torch" else cannot_train(version("triton"), torch.cuda.get_device_capability())
    return f"{backend} on cuda" + (f"; inference only: {reason}" if reason else "; trains too")


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
    if torch.is_grad_enabled() and (reason := cannot_train(version("triton"), torch.cuda.get_device_capability(q.device))):
        raise InputError(reason)
    if q.shape[1] == 1 and not torch.is_grad_enabled():
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as kernel
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    q, k = q.to(v.dtype), k.to(v.dtype)  # RoPE leaves them in float32 under autocast
    return kernel(q=q, k=k, v=v, g=log_decay, beta=beta, scale=1.0, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens)


def attend_packed(
    q: Float[Tensor, "1 head pos d_head"],
    k: Float[Tensor, "1 kv_head pos d_head"],
    v: Float[Tensor, "1 kv_head pos d_head"],
    documents: Int[Tensor, "n"],
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
) -> Float[Tensor, "1 pos head d_head"]:
    """Causal attention within each of the documents of a row: by flash attention in half precision on a GPU, else document by document.

    Args:
        documents: where they start, and the end of the last.
        window, sinks: a query sees the last ``window`` positions of its document, its own included, and the first ``sinks``.
    """
    if not q.is_cuda or v.dtype == torch.float32 or (sinks and window is not None):
        pieces = (tuple(x[:, :, start:stop] for x in (q, k, v)) for start, stop in pairwise(documents.tolist()))
        return torch.cat([attend(*piece, scale=scale, window=window, sinks=sinks) for piece in pieces], 1)
    starts, longest = documents.to(torch.int32), int(documents.diff().max())
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))
    return varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1 if window is None else window - 1, 0))[None]
