"""Figures: one function each, returning a plotly Figure and never showing it.

Every figure has a title that states its finding, computed from the data, and a caption with the settings; both are also in
``fig.layout.meta``. Maps are ``[layer, head]`` with layer 0 at the top, RdBu centred at zero. Backgrounds are transparent and
text is a grey that reads on white and on black.
"""

from hydralens.figures.checks import knockout_curve, mask_preview
from hydralens.figures.circuit import circuit
from hydralens.figures.clusters import head_clusters
from hydralens.figures.heads import head_heatmap, probe_facets, role_maps
from hydralens.figures.matrices import block_similarity, head_similarity, layer_similarity
from hydralens.figures.methods import detector_agreement, ratio_sweep
from hydralens.figures.profile import layer_profile
from hydralens.figures.saving import save_figure, save_figures
from hydralens.figures.stability import pairs_curve, stability_matrix, volcano

__all__ = [
    "block_similarity",
    "circuit",
    "detector_agreement",
    "head_clusters",
    "head_heatmap",
    "head_similarity",
    "knockout_curve",
    "layer_profile",
    "layer_similarity",
    "mask_preview",
    "pairs_curve",
    "probe_facets",
    "ratio_sweep",
    "role_maps",
    "save_figure",
    "save_figures",
    "stability_matrix",
    "volcano",
]
