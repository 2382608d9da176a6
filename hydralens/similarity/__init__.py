"""How alike layers are and how alike heads are, by what they hold, what they write and what they cause (HydraHead, Fig. 2).

``layer_similarity`` and ``head_similarity`` give one matrix each, ``similarities`` several of both from one pass over the prompts;
``block_structure`` tests whether layers, and whether heads, are alike in blocks.
"""

from hydralens.similarity.blocks import Blocks, BlockStructure, block_structure, head_blocks, layer_blocks
from hydralens.similarity.cka import debiased_cka
from hydralens.similarity.matrix import Similarity
from hydralens.similarity.measure import HEAD_METRICS, LAYER_METRICS, head_similarity, layer_similarity, similarities

__all__ = [
    "HEAD_METRICS",
    "LAYER_METRICS",
    "BlockStructure",
    "Blocks",
    "Similarity",
    "block_structure",
    "debiased_cka",
    "head_blocks",
    "head_similarity",
    "layer_blocks",
    "layer_similarity",
    "similarities",
]
