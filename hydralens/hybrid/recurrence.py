"""Linear recurrences in plain torch: Gated DeltaNet's in chunks, which trains on a CPU, and the step loop that defines it and all the others.

        S <- alpha_t S;   u = beta_t (v_t - S^T k_t);   S <- S + k_t u^T;   o_t = S^T q_t

Everything is computed in float32 at least. q and k are taken as given: who calls normalises and scales them.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hydralens.errors import InputError

CHUNK = 64


def gated_delta_rule(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head"],
    beta: Float[Tensor, "batch pos head"],
    *,
    initial_state: Float[Tensor, "batch head d_k d_v"] | None = None,
    cu_seqlens: Int[Tensor, "n"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "batch pos head d_v"], Float[Tensor, "batch head d_k d_v"]]:
    """Outputs and the state after the last token, chunk by chunk (the WY form of Yang et al., arXiv 2412.06464).

    With G the cumulative log decay within a chunk that starts from state S0, the updates u of all its tokens solve one triangular system:

        u_i + beta_i sum_{j<i} exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S0^T k_i)

    Args:
        log_decay: log alpha, at most 0, of any size: no positive number is ever exponentiated.
        initial_state: the state before the first token; zero by default.
        cu_seqlens: starts of documents in a batch of one, and the end of the last one; states are then one a document.

    Returns:
        out in the dtype of ``v``; the state in float32 (float64 for float64 inputs).

    Raises:
        InputError: shapes that do not fit, or documents that are not the whole row.
    """
    _check(q, k, v, log_decay, beta, initial_state, cu_seqlens)
    if cu_seqlens is not None:
        return _by_document(gated_delta_rule, q, k, v, log_decay, beta, initial_state, cu_seqlens, chunk=chunk)
    n_pos, dtype = q.shape[1], torch.promote_types(v.dtype, torch.float32)
    state = _first_state(k, v, initial_state, dtype)
    if n_pos == 0:
        return torch.empty_like(v), state
    # [batch head n_chunks token ...]; what fills the last chunk neither decays the state nor writes to it.
    q, k, v_, g, beta = (_in_chunks(x.to(dtype), chunk) for x in (q, k, v, log_decay, beta))
    beta = beta[..., None]
    places = torch.arange(q.shape[3], device=q.device)
    past, upto = places[:, None] > places, places[:, None] >= places
    # From token j to token i, summed between the two: a difference of sums from the start loses slow decays behind a strong one.
    decay = g[..., None].expand(*g.shape, len(places)).masked_fill(~past, 0).cumsum(-2).masked_fill(~upto, -torch.inf).exp()
    g = g.cumsum(-1)
    system = (beta * (k @ k.transpose(-1, -2)) * decay).masked_fill(~past, 0)
    right = torch.cat([beta * v_, beta * g.exp()[..., None] * k], -1)
    solved = torch.linalg.solve_triangular(system + torch.eye(len(places), dtype=dtype, device=q.device), right, upper=False, unitriangular=True)
    of_v, of_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    seen = (q @ k.transpose(-1, -2)) * decay
    read, kept = g.exp()[..., None] * q, decay[..., -1, :, None] * k
    out = []
    for index in range(q.shape[2]):
        update = of_v[:, :, index] - of_state[:, :, index] @ state
        out.append(read[:, :, index] @ state + seen[:, :, index] @ update)
        state = g[:, :, index, -1, None, None].exp() * state + kept[:, :, index].transpose(-1, -2) @ update
    return torch.cat(out, 2)[:, :, :n_pos].transpose(1, 2).to(v.dtype), state


def gated_delta_rule_recurrent(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head"],
    beta: Float[Tensor, "batch pos head"],
    *,
    initial_state: Float[Tensor, "batch head d_k d_v"] | None = None,
    cu_seqlens: Int[Tensor, "n"] | None = None,
) -> tuple[Float[Tensor, "batch pos head d_v"], Float[Tensor, "batch head d_k d_v"]]:
    """The same, token by token."""
    return linear_recurrence(q, k, v, log_decay, beta, delta=True, initial_state=initial_state, cu_seqlens=cu_seqlens)


def linear_recurrence(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head"] | Float[Tensor, "batch pos head d_k"],
    beta: Float[Tensor, "batch pos head"],
    *,
    delta: bool,
    initial_state: Float[Tensor, "batch head d_k d_v"] | None = None,
    cu_seqlens: Int[Tensor, "n"] | None = None,
) -> tuple[Float[Tensor, "batch pos head d_v"], Float[Tensor, "batch head d_k d_v"]]:
    """Every linear mixer, token by token: one decay a head or one a key channel; with ``delta`` what the key already recalls is taken off first.

    Without it u = beta_t v_t: lightning attention, gated linear attention, Mamba-2 (whose step size is beta).
    """
    _check(q, k, v, log_decay if log_decay.ndim == 3 else log_decay[..., 0], beta, initial_state, cu_seqlens)
    if cu_seqlens is not None:
        return _by_document(linear_recurrence, q, k, v, log_decay, beta, initial_state, cu_seqlens, delta=delta)
    dtype = torch.promote_types(v.dtype, torch.float32)
    log_decay = log_decay[..., None] if log_decay.ndim == 3 else log_decay
    state, out = _first_state(k, v, initial_state, dtype), []
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.to(dtype).unbind(1) for x in (q, k, v, log_decay, beta)), strict=True):
        state = g_t.exp()[..., None] * state
        recalled = (state.transpose(-1, -2) @ k_t[..., None])[..., 0] if delta else 0
        state = state + k_t[..., :, None] * (beta_t[..., None] * (v_t - recalled))[..., None, :]
        out.append((state.transpose(-1, -2) @ q_t[..., None])[..., 0])
    return (torch.stack(out, 1).to(v.dtype) if out else torch.empty_like(v)), state


def _check(q, k, v, log_decay, beta, initial_state, cu_seqlens) -> None:
    batch, n_pos, n_heads, d_k = q.shape
    n_states = batch if cu_seqlens is None else len(cu_seqlens) - 1
    expected = {
        "k": (k, (batch, n_pos, n_heads, d_k)),
        "v": (v, (batch, n_pos, n_heads, v.shape[-1])),
        "log_decay": (log_decay, (batch, n_pos, n_heads)),
        "beta": (beta, (batch, n_pos, n_heads)),
        "initial_state": (initial_state, (n_states, n_heads, d_k, v.shape[-1])),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InputError(f"{name} is {list(tensor.shape)}, expected {list(shape)} from q {list(q.shape)}; repeat keys and values to the query heads first")
    if cu_seqlens is not None and batch != 1:
        raise InputError(f"cu_seqlens packs documents into one row, q has a batch of {batch}")
    if cu_seqlens is not None and (int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != n_pos or (cu_seqlens.diff() < 0).any()):
        raise InputError(f"cu_seqlens is {cu_seqlens.tolist()[:20]}; it must run from 0 to the {n_pos} tokens of the row and never fall")


def _first_state(k: Tensor, v: Tensor, initial_state: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "batch head d_k d_v"]:
    if initial_state is not None:
        return initial_state.to(dtype)
    return torch.zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=dtype, device=k.device)


def _in_chunks(x: Float[Tensor, "batch pos head ..."], chunk: int) -> Float[Tensor, "batch head chunk token ..."]:
    x = x.transpose(1, 2)
    missing = -x.shape[2] % chunk
    x = torch.cat([x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])], 2) if missing else x
    return x.unflatten(2, (-1, chunk))


def _by_document(rule, q, k, v, log_decay, beta, initial_state, cu_seqlens, **options) -> tuple[Tensor, Tensor]:
    out, states = [], []
    ends = cu_seqlens.tolist()
    for index, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
        first = None if initial_state is None else initial_state[index : index + 1]
        own, state = rule(*(x[:, start:stop] for x in (q, k, v, log_decay, beta)), initial_state=first, **options)
        out.append(own)
        states.append(state)
    return torch.cat(out, 1), torch.cat(states)
