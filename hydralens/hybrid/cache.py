"""What a hybrid remembers between calls: keys and values of its full heads, which grow, and the recurrent state of its linear heads, which does not."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from hydralens.errors import InputError

ROOM = 256  # positions


class HybridLayer(CacheLayerMixin):
    """One layer's memory: named tensors whose first axis is the batch, whatever the branches put there, and how many tokens were seen.

    transformers' own hybrid layers lose the state of a branch without convolution, and round it to the type of the first tensor stored; this one
    keeps what it is given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}
        self.rooms: dict[str, Tensor] = {}  # what grows lies at the start of one of these
        self.n_tokens = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of what is remembered; room to grow, an eighth of it at most beyond the first ``ROOM`` positions, is not counted."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def append(self, name: str, new: Tensor) -> Tensor:
        """``name`` with ``new`` joined on the position axis 2, which is kept and returned.

        A token costs its own bytes and not a copy of all before it, but for the few times that the room is used up. Under autograd, which may need
        what was there, everything is copied.
        """
        past = self.tensors.get(name)
        if past is None or torch.is_grad_enabled():
            self.tensors[name] = new if past is None else torch.cat([past, new], 2)
            return self.tensors[name]
        n_past, n_all = past.shape[2], past.shape[2] + new.shape[2]
        room = self.rooms.get(name)
        # Trimmed or taken over from another memory, what is remembered lies elsewhere.
        elsewhere = room is None or past.data_ptr() != room.data_ptr() or past.stride() != room.stride()
        if elsewhere or room.shape[2] < n_all or room.is_inference() != torch.is_inference_mode_enabled():
            room = self.rooms[name] = past.new_empty(*past.shape[:2], n_all + max(ROOM, n_all // 8), *past.shape[3:])
            room[:, :, :n_past] = past
        room[:, :, n_past:n_all] = new
        self.tensors[name] = room[:, :, :n_all]
        return self.tensors[name]

    def row(self, index: int) -> "HybridLayer":
        """One row of the batch alone."""
        return self._of({name: tensor[index : index + 1] for name, tensor in self.tensors.items()})

    def continued(self, n_rows: int) -> "HybridLayer":
        """A memory to go on with that leaves this one as it is, its only row shared by ``n_rows``."""
        return self._of({name: tensor.expand(n_rows, *tensor.shape[1:]) for name, tensor in self.tensors.items()})

    def _of(self, tensors: dict[str, Tensor]) -> "HybridLayer":
        other = HybridLayer()
        other.tensors, other.n_tokens = tensors, self.n_tokens
        return other

    def get_seq_length(self) -> int:
        return self.n_tokens

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.24

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.n_tokens + query_length, 0

    def reset(self) -> None:
        self.tensors, self.rooms, self.n_tokens = {}, {}, 0

    def reorder_cache(self, beam_idx: Int[Tensor, "batch"]) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, "batch"]) -> None:
        self.tensors, self.rooms = {name: tensor[indices.to(tensor.device)] for name, tensor in self.tensors.items()}, {}

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.tensors, self.rooms = {name: tensor.repeat_interleave(repeats, 0) for name, tensor in self.tensors.items()}, {}

    def crop(self, *_: Any) -> None:
        raise InputError("a hybrid's cache cannot be cropped: the recurrent state of its linear heads cannot forget tokens; run the shorter prompt again")

    def lazy_initialization(self, *_: Any) -> None:
        """Nothing to do: tensors are made by the branches."""

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the branches of a hybrid write their own tensors")


class HybridCache(Cache):
    """One ``HybridLayer`` per layer."""

    def __init__(self, n_layers: int) -> None:
        super().__init__(layers=[HybridLayer() for _ in range(n_layers)])

    @property
    def n_bytes(self) -> int:
        """Bytes held, all layers together."""
        return sum(layer.n_bytes for layer in self.layers)

    def crop(self, *_: Any) -> None:
        self.layers[0].crop()
