"""One process or many: the same code, whether ``torchrun`` started it or not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process among all."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        x = x.detach().clone()
        dist.all_reduce(x)
        return x

    def wait(self) -> None:
        """Until all ranks are here."""
        dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


@contextmanager
def all_ranks(device: str | None = None) -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, or this process alone; device: ``cpu`` or ``cuda``, the default where there is one."""
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    backend = "nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        local = int(os.environ["LOCAL_RANK"])
        own = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(own)
        dist.init_process_group(backend)
    else:
        own = torch.device(device) if device and ":" in device else torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), own, init_device_mesh(kind, (dist.get_world_size(),)))
    finally:
        dist.destroy_process_group()


def share() -> tuple[int, int]:
    """This process's rank and how many there are; 0 of 1 outside ``all_ranks``."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def wait_for_all() -> None:
    """Until all ranks are here."""
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def launched(device: str | None) -> Iterator[tuple[bool, str | None]]:
    """``all_ranks`` where ``torchrun`` started this process, nothing otherwise: whether this is the first rank, and its own device."""
    if "RANK" not in os.environ:
        yield True, device
        return
    with all_ranks(device) as ranks:
        yield ranks.first, str(ranks.device)
