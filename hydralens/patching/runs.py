"""The two runs of a pair, and many patched runs continued from them as rows of one batch."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hydralens.models.anatomy import Anatomy
from hydralens.models.attention import KeysValues
from hydralens.models.forward import Trace, trace
from hydralens.patching.pairs import Pair

NO_HEAD = -1  # a cell that patches nothing: a baseline row of the same batch shape, on which low-precision rounding depends

Cell = tuple[int, int]  # (layer, head), the head a KV head where k or v is patched


@dataclass(frozen=True, eq=False)
class PairRuns:
    """Clean (row 0) and corrupt (row 1) run of a pair; the tokens before their first difference are run once."""

    runs: Trace  # its columns are ``start`` and everything after it
    prefix: Trace | None
    start: int
    patched: Bool[Tensor, "pos"]  # where the intervention applies and clean and corrupt can differ
    shared: int  # tokens of the prefix

    def behind(self, layer: int, row: int) -> Any:
        """What attention of the columns needs of everything before them, in the clean or the corrupt run."""
        if not self.runs.k:
            return None if self.prefix is None else self.prefix.memory[layer].row(row)
        return self.behind_keys(layer, self.runs.k[layer][row], self.runs.v[layer][row])

    def behind_keys(self, layer: int, k: Float[Tensor, "kv_head pos d_head"], v: Float[Tensor, "kv_head pos d_head"]) -> KeysValues:
        """Keys and values of everything before the columns, of a run whose own ``k`` and ``v`` follow the shared prefix."""
        before = k.shape[1] - len(self.runs.columns)
        own = k[None, :, :before], v[None, :, :before]
        return own if self.prefix is None else (torch.cat((self.prefix.k[layer], own[0]), 2), torch.cat((self.prefix.v[layer], own[1]), 2))


def run_pair(anatomy: Anatomy, pair: Pair, positions: str, keep: Collection[str], read_only: bool = False) -> PairRuns:
    """Both runs, with the named sites kept from the first patched position on, or with ``read_only`` from the first read position."""
    shared = pair.first_difference
    patched = pair.patched(positions)
    patched[:shared] = False
    start = int(pair.read.min())
    if not read_only and patched.any():
        start = min(start, int(patched.nonzero()[0]))
    columns = torch.arange(start, len(pair.clean), device=pair.clean.device)
    tokens = torch.stack((pair.clean, pair.corrupt))
    # A recurrent state cannot be cut at a position afterwards, as keys can: there both runs' states just before the columns are kept.
    shared, rows = (shared, 1) if "k" in anatomy.past else (start, 2)
    prefix = trace(anatomy, tokens[:rows, :shared], columns[:0], anatomy.past) if shared else None
    runs = trace(anatomy, tokens[:, shared:], columns, keep, prefix=prefix)
    return PairRuns(runs, prefix, start, patched, shared)


def patched_runs(
    anatomy: Anatomy,
    both: PairRuns,
    base: int,
    alternatives: list[Float[Tensor, "column head d_head"]],
    cells: list[Cell],
    *,
    group: int = 1,
    live: bool = False,
    freeze_mlps: bool = False,
) -> Iterator[tuple[int, Float[Tensor, "cell column d_model"]]]:
    """One run per cell whose head (or whole group of ``group`` heads) takes its alternative z; cells are sorted by layer.

    Yields, from the first cell's layer on, each following layer with the residual stream entering it, of the runs that have begun;
    last ``(n_layers, final residual)``.

    Args:
        live: later attention is recomputed; otherwise it writes what it wrote in the base run, and all is position-wise.
        freeze_mlps: MLPs too write what they wrote in the base run.
    """
    runs = both.runs
    rows = runs.residual[0][:0]
    for index in range(cells[0][0], anatomy.n_layers):
        layer = anatomy.layers[index]
        if live and len(rows):
            z, _ = layer.mix(rows, runs.ropes[layer.rope_kind], both.behind(index, base))
            rows = rows + layer.write(z, rows)
        elif len(rows):
            rows = rows + runs.written[index][base]
        heads = [head for cell_layer, head in cells if cell_layer == index]
        if heads:
            readers = torch.arange(anatomy.n_heads, device=rows.device) // group
            chosen = torch.tensor(heads, device=rows.device)[:, None] == readers
            new = torch.where(chosen[:, None, :, None], alternatives[index], runs.z[index][base])
            before = runs.residual[index][base][None]
            rows = torch.cat((rows, before + layer.write(new, before)))
        rows = rows + fed(anatomy, runs, index, base) if freeze_mlps else layer.feed(rows)
        yield index + 1, rows


def fed(anatomy: Anatomy, runs: Trace, index: int, base: int) -> Float[Tensor, "column d_model"]:
    """What the MLP of a layer added to the residual stream."""
    after = runs.residual[index + 1] if index + 1 < anatomy.n_layers else runs.final
    return after[base] - runs.residual[index][base] - runs.written[index][base]


def replaced_z(runs: Trace, patched: Bool[Tensor, "column"], base: int, source: int) -> list[Float[Tensor, "column head d_head"]]:
    """Per layer, z of the base run with the source run's at the patched columns."""
    return [torch.where(patched[:, None, None], z[source], z[base]) for z in runs.z]


def alternative_z(anatomy: Anatomy, both: PairRuns, base: int, source: int, component: str) -> list[Float[Tensor, "column head d_head"]]:
    """Per layer, z of every head as it would be if that head's component (its KV head's for k and v) were patched."""
    runs, patched = both.runs, both.patched
    if component == "z":
        return replaced_z(runs, patched[both.start :], base, source)
    alternatives = []
    for index, layer in enumerate(anatomy.layers):
        inputs = {"q": runs.q[index], "k": runs.k[index], "v": runs.v[index]}
        where = patched[both.start :] if component == "q" else patched[both.shared :]
        mixed = torch.where(where[:, None], inputs[component][source], inputs[component][base])
        q, k, v = (mixed if name == component else x[base] for name, x in inputs.items())
        new = slice(-len(runs.columns), None)
        alternatives.append(layer.attend(q[None], k[None, :, new], v[None, :, new], both.behind_keys(index, k, v))[0])
    return alternatives
