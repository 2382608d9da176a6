"""Who runs the delta rule, causal attention and the fusion: chosen by where the tensors are when it is called.

    operation     variable             auto on a GPU                                      auto elsewhere
    delta rule    HYDRALENS_GDN        fla; an error where it is missing                  torch, chunk by chunk
    attention     HYDRALENS_ATTN       fa4, else fa2, where installed and the heads fit   torch (SDPA, varlen)
    fusion        HYDRALENS_FUSION     torch; triton by name                              torch

The variables win over what the model's config says; both take ``auto``.
"""

import importlib
import os
import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from hydralens.errors import InputError, check_word
from hydralens.hybrid.recurrence import gated_delta_rule
from hydralens.models.attention import attend

GDN, ATTENTION, FUSION = "HYDRALENS_GDN", "HYDRALENS_ATTN", "HYDRALENS_FUSION"
WORDS = {GDN: ("auto", "torch", "fla"), ATTENTION: ("auto", "torch", "fa2", "fa4"), FUSION: ("auto", "torch", "triton")}
FLASH = {"fa4": ("flash-attn-4", 128, 9), "fa2": ("flash-attn", 256, 8)}  # package, widest head, oldest compute capability
FIRST_BROKEN, FIRST_MENDED = (3, 4, 0), (3, 7, 1)  # Triton: between them fla refuses this backward on Hopper, where it was miscompiled
NEEDS_FLA = 'Gated DeltaNet on a GPU needs fla: pip install "fla-core>=0.6,<0.7" (or say HYDRALENS_GDN=torch, correct but slow)'


def gdn_backend(device: torch.device, wanted: str = "auto") -> str:
    """``"torch"`` or ``"fla"`` for the delta rule. The environment's ``HYDRALENS_GDN`` wins over ``wanted``.

    Raises:
        InputError: ``auto`` on a GPU without fla, fla on a CPU, or an unknown word.
    """
    wanted = _wanted(GDN, wanted)
    if wanted == "torch" or (wanted == "auto" and device.type != "cuda"):
        return "torch"
    if device.type != "cuda":
        raise InputError(f"{GDN}=fla, but the model is on {device.type}, where fla's kernels do not run; use auto or torch")
    if not _installed("fla-core") or not _installed("triton"):
        raise InputError(NEEDS_FLA)
    return "fla"


def attention_backend(device: torch.device, dtype: torch.dtype, head_dim: int, wanted: str = "auto") -> str:
    """``"torch"`` (SDPA and varlen attention), ``"fa2"`` or ``"fa4"`` (flash-attn 2 and 4). The environment's ``HYDRALENS_ATTN`` wins over ``wanted``.

    Raises:
        InputError: a backend asked for by name that is missing or cannot do it, or an unknown word.
    """
    wanted = _wanted(ATTENTION, wanted)
    if wanted == "auto":
        return next((name for name in FLASH if _hinders_flash(name, device, dtype, head_dim) is None), "torch")
    if wanted != "torch" and (reason := _hinders_flash(wanted, device, dtype, head_dim)):
        raise InputError(f"{ATTENTION}={wanted}, but {reason}; use auto or torch")
    return wanted


def fusion_backend(device: torch.device, wanted: str = "auto") -> str:
    """``"torch"`` or ``"triton"`` for what surrounds the two kinds of heads. The environment's ``HYDRALENS_FUSION`` wins over ``wanted``.

    ``auto`` is torch for now: the kernels agree with it under Triton's interpreter, and were not measured on a GPU yet.

    Raises:
        InputError: triton on a CPU (where only its interpreter runs, ``TRITON_INTERPRET=1``) or not installed, or an unknown word.
    """
    wanted = _wanted(FUSION, wanted)
    runs = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    if wanted != "triton":
        return "torch"
    if not (runs and _installed("triton")):
        raise InputError(f"{FUSION}=triton, but {'triton is not installed' if runs else f'the model is on {device.type}'}; use auto or torch")
    return wanted


def _wanted(variable: str, wanted: str) -> str:
    wanted = os.environ.get(variable, wanted)
    check_word(variable, wanted, WORDS[variable])
    return wanted


def _hinders_flash(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    package, widest, oldest = FLASH[name]
    if device.type != "cuda":
        return f"the model is on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the model is in {str(dtype).removeprefix('torch.')}, not in half precision"
    if head_dim > widest or head_dim % 8:
        return f"heads have {head_dim} channels; it takes multiples of 8 up to {widest}"
    if not _installed(package):
        return f"{package} is not installed"
    major = torch.cuda.get_device_capability(device)[0]
    return None if major >= oldest else f"this GPU has compute capability {major}, and {package} needs {oldest}"


@cache
def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def cannot_train(triton: str, capability: tuple[int, int]) -> str | None:
    """Why fla's backward would refuse to run with this Triton on a GPU of this compute capability; None where it runs."""
    release = tuple(int(part) for part in re.findall(r"\d+", triton)[:3])
    if capability[0] != 9 or not FIRST_BROKEN <= release < FIRST_MENDED:
        return None
    return f"fla refuses the backward of Gated DeltaNet on Hopper with Triton {triton}; pip install 'triton>=3.7.1', or train with {GDN}=torch"


def doctor_lines() -> dict[str, str]:
    """What runs each operation of a hybrid on this machine, and whether its linear heads train."""
    if not torch.cuda.is_available():
        return {"linear heads": "torch, chunk by chunk: there is no GPU", "full heads": "torch SDPA", "fusion": "torch"}
    device = torch.device("cuda")
    try:
        linear = gdn_backend(device)
    except InputError as error:
        linear, reason = str(error), None
    else:
        reason = None if linear == "torch" else cannot_train(version("triton"), torch.cuda.get_device_capability())
        linear += " on cuda" + (f"; inference only: {reason}" if reason else "; trains too")
    full = attention_backend(device, torch.bfloat16, 128)
    others = [f"not {name}: {why}" for name in FLASH if (why := _hinders_flash(name, device, torch.bfloat16, 128))]
    return {"linear heads": linear, "full heads": "; ".join([f"{full} on cuda in half precision", *others]), "fusion": f"{fusion_backend(device)} on cuda"}


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


def attend_causal(
    q: Float[Tensor, "batch head pos d_head"],
    k: Float[Tensor, "batch kv_head key d_head"],
    v: Float[Tensor, "batch kv_head key d_head"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "batch pos head d_head"]:
    """Causal attention in which the last query sees the last key; query head ``h`` reads KV head ``h // group``. Scores are divided by sqrt(d_head)."""
    n_queries, n_keys, q = q.shape[2], k.shape[2], q.to(v.dtype)  # RoPE leaves q and k in float32 under autocast
    k, chosen = k.to(v.dtype), attention_backend(q.device, v.dtype, q.shape[3], backend)
    if chosen != "torch":
        return _plain(_flash(chosen)[0](*(x.transpose(1, 2) for x in (q, k, v)), causal=True))
    if n_queries == n_keys or n_queries == 1:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=n_queries > 1, enable_gqa=q.shape[1] != k.shape[1])
    else:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(n_queries, n_keys))
    return out.transpose(1, 2)


def attend_packed(
    q: Float[Tensor, "1 head pos d_head"],
    k: Float[Tensor, "1 kv_head pos d_head"],
    v: Float[Tensor, "1 kv_head pos d_head"],
    documents: Int[Tensor, "n"],
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    backend: str = "auto",
) -> Float[Tensor, "1 pos head d_head"]:
    """Causal attention within each of the documents of a row: by flash attention in half precision on a GPU, else document by document.

    Args:
        documents: where they start, and the end of the last.
        window, sinks: a query sees the last ``window`` positions of its document, its own included, and the first ``sinks``.
    """
    if not q.is_cuda or v.dtype not in (torch.float16, torch.bfloat16) or (sinks and window is not None):
        pieces = (tuple(x[:, :, start:stop] for x in (q, k, v)) for start, stop in pairwise(documents.tolist()))
        return torch.cat([attend(*piece, scale=scale, window=window, sinks=sinks) for piece in pieces], 1)
    starts, longest = documents.to(torch.int32), int(documents.diff().max())
    chosen = attention_backend(q.device, v.dtype, q.shape[3], backend)
    if chosen == "torch":
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))
    seen = (-1 if window is None else window - 1, 0)
    if chosen == "torch":
        return varlen_attn(q, k, v, starts, starts, longest, longest, scale=scale, window_size=seen)[None]
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return _plain(_flash(chosen)[1](q, k, v, **lengths, softmax_scale=scale, causal=True, **({} if window is None else {"window_size": seen})))[None]


def _flash(name: str) -> tuple[Callable, Callable]:
    """Dense and varlen attention of a flash-attn package."""
    module = importlib.import_module("flash_attn.cute" if name == "fa4" else "flash_attn")
    return module.flash_attn_func, module.flash_attn_varlen_func


def _plain(out: Tensor | tuple[Tensor, ...]) -> Tensor:
    """flash-attn 4 gives the log-sum-exp too."""
    return out[0] if isinstance(out, tuple) else out
