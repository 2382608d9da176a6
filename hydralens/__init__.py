"""hydralens finds the attention heads a pretrained transformer needs, by causal experiment, and writes them down as a head mask.

Importing this package is quick: every public name is fetched from its module, and torch with it, when it is first used.
"""

import importlib

__version__ = "0.1.0"

_HOME = {  # public name -> the module that defines it
    "InputError": "hydralens.errors",
    "load_model": "hydralens.models.loading",
    "LensModel": "hydralens.models.lens",
    "Anatomy": "hydralens.models.anatomy",
    "ModelInfo": "hydralens.models.info",
    "Probe": "hydralens.probes.base",
    "activation_patch": "hydralens.patching.activation",
    "path_patch": "hydralens.patching.path",
    "edge_maps": "hydralens.patching.path",
    "trace_circuit": "hydralens.patching.circuit",
    "attribution_patch": "hydralens.patching.attribution",
    "attribution_error": "hydralens.patching.attribution",
    "ablate": "hydralens.patching.ablation",
    "HeadEffects": "hydralens.patching.effects",
    "HeadScores": "hydralens.scores",
    "score_heads": "hydralens.scoring",
    "HeadMask": "hydralens.head_mask",
    "select_heads": "hydralens.selection",
    "layer_similarity": "hydralens.similarity.measure",
    "head_similarity": "hydralens.similarity.measure",
    "block_structure": "hydralens.similarity.blocks",
    "Similarity": "hydralens.similarity.matrix",
    "head_profile": "hydralens.profiles",
    "attention_profile": "hydralens.profiles",
    "build_hybrid": "hydralens.hybrid.build",
    "HydraHeadConfig": "hydralens.hybrid.config",
    "HydraHeadForCausalLM": "hydralens.hybrid.modeling",
}
_MODULES = ("detectors", "figures", "patching", "probes", "statistics", "widgets")

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"hydralens.{name}")
    else:
        raise AttributeError(f"module 'hydralens' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
