"""Are layers alike in blocks, and are the heads of a layer such a block: segmentations with an effect size and a p-value.

A block structure is a division of the items into blocks of neighbours. Its size is how much more alike two items of one block are than two of
different blocks (``gain``), and how much of the variance of all similarities that explains (``explained``). Two questions are asked of layers:

* Is there any order: blocks against what the same search finds when layers are shuffled. Any drift over depth passes that, blocks or not.
* Are there blocks: the same after taking out how similarity falls with distance, against chains of vectors that drift evenly. A passing result
  means that likeness changes at places, not everywhere at the same pace.

The blocks are those of the highest modularity, the sum over pairs within blocks of similarity minus what is expected of the pair: the mean over
all pairs, or over pairs at the same distance (spatial modularity, Expert et al. 2011, arXiv 1012.3409). For blocks of neighbours the maximum is
found exactly, by dynamic programming, and with it the number of blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from hydralens.errors import InputError
from hydralens.similarity.matrix import Similarity

LEVEL = 0.05
SMALL, MEDIUM = 0.01, 0.09  # shares of variance: below the first a structure counts as none, however sure it is (Cohen 1988: r = 0.1 and 0.3)
ROUNDING = 1e-6  # similarities are float32: smaller differences are none
DRAWS = 999

Matrix = Float[np.ndarray, "item item"]


@dataclass(frozen=True)
class Blocks:
    """A division of items into blocks of neighbours, and whether it means anything.

    Attributes:
        starts: the first item of every block.
        n_items: items in all.
        within, between: mean similarity of two items of one block, and of different blocks.
        within_share: share of all positive similarity that lies within blocks.
        gain: effect size in units of similarity: how much more alike two items of one block are, at equal distance where distance is taken out.
        explained: effect size, 0..1: the share of the variance of similarities that the blocks explain, beyond distance where that is taken out.
        null_explained: the mean of it under the null hypothesis.
        p: share of null draws (and the data) whose blocks fit what is left to explain at least as well.
        against: the null hypothesis, for a person.
        n_draws: draws from it.
    """

    starts: tuple[int, ...]
    n_items: int
    within: float
    between: float
    within_share: float
    gain: float
    explained: float
    null_explained: float
    p: float
    against: str
    n_draws: int

    @property
    def is_real(self) -> bool:
        """Surer than 0.05, and more than a hundredth of the variance."""
        return self.p < LEVEL and self.explained >= SMALL

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last item of every block."""
        return [(start, stop - 1) for start, stop in zip(self.starts, (*self.starts[1:], self.n_items), strict=True)]


@dataclass(frozen=True)
class BlockStructure:
    """Layers and heads by the same measure.

    Attributes:
        ordered: layers in blocks, against shuffled layers.
        layers: layers in blocks beyond distance, against even drift.
        heads: each layer as a block of heads, against heads dealt to layers at random.
        magnitudes: the same by the magnitude of similarity: heads that write along one line in opposite directions cancel in ``heads``.
    """

    ordered: Blocks
    layers: Blocks
    heads: Blocks
    magnitudes: Blocks

    @property
    def finding(self) -> str:
        """One sentence: are layers alike in blocks, are the heads of a layer."""
        heads = max(self.heads, self.magnitudes, key=lambda blocks: blocks.explained)
        verb = "are not" if not heads.is_real else "hardly are" if heads.explained < MEDIUM else "are"
        if self.layers.is_real:
            return (
                f"Layers are alike in blocks ({self.ordered.explained:.0%} of the variance, {self.layers.explained:.0%} beyond distance); "
                f"the heads of a layer {verb} ({heads.explained:.1%})"
            )
        layers = "Layers drift apart evenly with depth, in no blocks" if self.ordered.is_real else "Layers are alike in no order of depth"
        return f"{layers}; the heads of a layer {verb} alike ({heads.explained:.1%} of the variance)"


def block_structure(layers: Similarity, heads: Similarity, n_draws: int = DRAWS, seed: int = 0) -> BlockStructure:
    """Test whether layers are alike in blocks and whether layers are blocks of heads.

    Raises:
        InputError: ``layers`` is no matrix of layers, or ``heads`` no matrix of heads, or one has fewer than two items that can be compared.
    """
    ordered, beyond = layer_blocks(layers, n_draws, seed)
    magnitudes = replace(heads, matrix=heads.matrix.abs())
    return BlockStructure(ordered, beyond, head_blocks(heads, n_draws=n_draws, seed=seed), head_blocks(magnitudes, n_draws=n_draws, seed=seed))


def layer_blocks(sim: Similarity, n_draws: int = DRAWS, seed: int = 0) -> tuple[Blocks, Blocks]:
    """Blocks of layers: against shuffled layers, and beyond distance against even drift.

    Even drift is a chain of random vectors with the same mean similarity at each distance, stationary over depth, in as many dimensions as make
    its similarities scatter around that mean as much as the data's do: neighbouring layers of it are alike, and no place is special.

    Raises:
        InputError: not a matrix of layers, or fewer than two layers can be compared.
    """
    matrix, _ = _comparable(sim, "layer")
    n, rng = len(matrix), np.random.default_rng(seed)
    distance = np.abs(np.arange(n)[:, None] - np.arange(n))
    shuffled = (matrix[np.ix_(order, order)] for order in (rng.permutation(n) for _ in range(n_draws)))
    return (
        _searched(matrix, np.minimum(distance, 1), shuffled, "shuffled layers"),
        _searched(matrix, distance, _drifting(matrix, distance, n_draws, rng), "layers that drift evenly"),
    )


def head_blocks(sim: Similarity, group: int | None = None, n_draws: int = DRAWS, seed: int = 0) -> Blocks:
    """Layers as blocks of heads, against heads dealt to layers at random. Nothing is searched: the blocks are the layers.

    Args:
        group: ask it of the KV groups of this many heads (``model.info.group``) instead of layers.

    Raises:
        InputError: not a matrix of heads, or fewer than two heads can be compared.
    """
    matrix, known = _comparable(sim, "head")
    block = sim.layers.numpy()
    if group is not None:
        block = np.arange(len(block)) // group
    starts, rng = np.flatnonzero(np.diff(block[known], prepend=-1)), np.random.default_rng(seed)
    classes = 1 - np.eye(len(matrix), dtype=np.int8)
    found, left = _measure(matrix, starts, classes), _left(matrix, classes)

    def excess(order: Int[np.ndarray, "item"]) -> float:
        return sum(float(left[np.ix_(heads, heads)].sum()) for heads in np.split(order, starts[1:]))

    # From draw to draw only the similarity within blocks differs, and what they explain goes with its square.
    own, drawn = excess(np.arange(len(matrix))), np.array([excess(rng.permutation(len(matrix))) for _ in range(n_draws)])
    null = found.explained * float(np.square(drawn / own).mean()) if own else 0.0
    against = f"heads dealt to {'layers' if group is None else 'groups'} at random"
    return _blocks(matrix, starts, found, null, _p(own, drawn), against, n_draws)


# --- what blocks explain -------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    gain: float
    fit: float  # of the variance left within classes, the share that the blocks explain: the statistic that is tested
    explained: float  # the same as a share of all variance


def _comparable(sim: Similarity, kind: str) -> tuple[Matrix, Bool[np.ndarray, "item"]]:
    """The matrix without items that have nothing to compare (NaN), and which ones are in it."""
    if sim.kind != kind:
        raise InputError(f"this is a {sim.kind} similarity; pass the result of {kind}_similarity")
    matrix = sim.matrix.detach().double().cpu().numpy()
    known = np.isfinite(matrix.diagonal())
    if known.sum() < 2:
        raise InputError(f"{known.sum()} of {len(known)} {kind}s can be compared, and blocks need at least 2; use other probes or another metric")
    return matrix[np.ix_(known, known)], known


def _left(matrix: Matrix, classes: Int[np.ndarray, "item item"]) -> Matrix:
    """Each pair's value minus the mean of its class (all pairs, or those at one distance); 0 on the diagonal, which is class 0."""
    cells = classes.ravel()
    left = matrix - (np.bincount(cells, matrix.ravel()) / np.bincount(cells))[classes]
    left[np.abs(left) < ROUNDING] = 0
    np.fill_diagonal(left, 0)
    return left


def _measure(matrix: Matrix, starts: Sequence[int], classes: Int[np.ndarray, "item item"]) -> _Found:
    """The regression of similarity on "in one block", within classes."""
    left, same = _left(matrix, classes), _left(_same(starts, len(matrix)).astype(float), classes)
    overlap, spread, unexplained = (same * left).sum(), np.square(same).sum(), np.square(left).sum()
    if not (spread and unexplained):  # one block, only blocks of one, or nothing left
        return _Found(0.0, 0.0, 0.0)
    total = np.square(_left(matrix, np.minimum(classes, 1))).sum()
    return _Found(float(overlap / spread), float(overlap**2 / (spread * unexplained)), float(overlap**2 / (spread * total)))


def _same(starts: Sequence[int], n: int) -> Bool[np.ndarray, "item item"]:
    block = np.zeros(n, int)
    block[list(starts)] = 1
    block = block.cumsum()
    return block[:, None] == block


def _best_starts(left: Matrix) -> list[int]:
    """The blocks of neighbours with the highest sum of ``left`` within them; where several are equal, the fewest."""
    n = len(left)
    sums = np.zeros((n + 1, n + 1))
    sums[1:, 1:] = np.triu(left, 1).cumsum(0).cumsum(1)
    corner = sums.diagonal()  # of each upper left square; a block start..stop holds corner[stop] - sums[start, stop], all of whose rows come later
    best, back = np.zeros(n + 1), np.zeros(n + 1, int)
    for stop in range(1, n + 1):
        totals = best[:stop] + corner[stop] - sums[:stop, stop]
        back[stop] = np.flatnonzero(totals >= totals.max() - ROUNDING)[0]
        best[stop] = totals[back[stop]]
    starts = [int(back[n])]
    while starts[0]:
        starts.insert(0, int(back[starts[0]]))
    return starts


# --- null hypotheses -----------------------------------------------------------------------------------------------


def _searched(matrix: Matrix, classes: Int[np.ndarray, "item item"], nulls: Iterator[Matrix], against: str) -> Blocks:
    """The best blocks of ``matrix`` beside those of every null matrix, all searched alike."""
    starts = _best_starts(_left(matrix, classes))
    found = _measure(matrix, starts, classes)
    drawn = [_measure(null, _best_starts(_left(null, classes)), classes) for null in nulls]
    null = float(np.mean([draw.explained for draw in drawn]))
    return _blocks(matrix, starts, found, null, _p(found.fit, np.array([draw.fit for draw in drawn])), against, len(drawn))


def _drifting(matrix: Matrix, distance: Int[np.ndarray, "item item"], n_draws: int, rng: np.random.Generator) -> Iterator[Matrix]:
    """Cosines of Gaussian vectors whose expected similarity is the mean of ``matrix`` at each distance (made positive semidefinite)."""
    left = _left(matrix, distance)
    mean = matrix - left
    values, directions = np.linalg.eigh(mean)
    root = directions * np.sqrt(values.clip(0))
    # The cosine of two vectors of d dimensions with expectation c varies by about (1 - c^2)^2 / d.
    scatter = np.square(left).sum()
    most = 4 * len(matrix)
    dimensions = int(np.clip(np.square(1 - mean**2).sum() / scatter, 2, most)) if scatter else most
    for _ in range(n_draws):
        vectors = root @ rng.standard_normal((len(matrix), dimensions))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        yield vectors @ vectors.T


def _p(own: float, drawn: Float[np.ndarray, "draw"]) -> float:
    """One-sided; the data are a draw themselves, and equal but for rounding counts as reached."""
    return float((1 + (drawn >= own - 1e-9 * abs(own)).sum()) / (1 + len(drawn)))


def _blocks(matrix: Matrix, starts: Sequence[int], found: _Found, null_explained: float, p: float, against: str, n_draws: int) -> Blocks:
    n = len(matrix)
    pairs = np.triu(np.ones((n, n), dtype=bool), 1)
    same = _same(starts, n)
    within, between = matrix[same & pairs], matrix[~same & pairs]
    positive = within.clip(0).sum() + between.clip(0).sum()
    return Blocks(
        starts=tuple(int(start) for start in starts),
        n_items=n,
        within=float(within.mean()) if len(within) else float("nan"),
        between=float(between.mean()) if len(between) else float("nan"),
        within_share=float(within.clip(0).sum() / positive) if positive else float("nan"),
        gain=found.gain,
        explained=found.explained,
        null_explained=null_explained,
        p=p,
        against=against,
        n_draws=n_draws,
    )
