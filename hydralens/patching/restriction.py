"""Attention restricted to sinks and a recent window: what a mask does to the heads it does not keep, without training anything."""

import torch
from jaxtyping import Bool
from torch import Tensor

from hydralens.models.anatomy import Anatomy
from hydralens.models.forward import Attention, attend

WINDOW, SINKS = 64, 4  # the sizes of the preview: the last 64 positions, the query's own included, and the first 4


def restricted_attention(anatomy: Anatomy, keep: Bool[Tensor, "layer head"], window: int = WINDOW, sinks: int = SINKS) -> Attention:
    """For ``trace``: heads in ``keep`` attend as the model does, every other head only to ``sinks`` and the last ``window`` positions.

    A layer that already has a shorter window of its own keeps it for its restricted heads (with the sinks added).
    """

    def attention(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer, kept = anatomy.layers[index], keep[index].to(q.device)
        own = {"scale": layer.scale, "softcap": layer.softcap}
        narrow = window if layer.window is None else min(window, layer.window)
        if kept.all():
            return attend(q, k, v, **own, window=layer.window)
        restricted = attend(q, k, v, **own, window=narrow, sinks=sinks)
        if not kept.any():
            return restricted
        return torch.where(kept[:, None], attend(q, k, v, **own, window=layer.window), restricted)

    return attention
