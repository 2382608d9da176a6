"""TransformerLens bridges and nnsight models, both directions.

Both libraries rewire the modules of the model they are given: a bridge replaces them by its own components, nnsight wraps their ``forward``.
What crosses over is therefore a twin: fresh modules around the very same tensors, so that neither side is altered and no weight is copied.
Neither library is imported before it is asked for.
"""

import copy
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hydralens.errors import InputError
from hydralens.models.anatomy import check_family

if TYPE_CHECKING:
    from nnsight.intervention.envoy import Envoy
    from transformer_lens import TransformerBridge

    from hydralens.models.lens import LensModel

_BRIDGED = "_original_component."  # a bridge keeps what it replaces under this name


def is_transformer_lens(source: Any) -> bool:
    """Whether ``source`` is a TransformerLens ``TransformerBridge``."""
    library = sys.modules.get("transformer_lens.model_bridge")
    return library is not None and isinstance(source, library.TransformerBridge)


def is_nnsight(source: Any) -> bool:
    """Whether ``source`` is a model wrapped by nnsight (``TransformersModel``, ``LanguageModel`` or ``NNsight``)."""
    library = sys.modules.get("nnsight.intervention.envoy")
    return library is not None and isinstance(source, library.Envoy)


def from_transformer_lens(bridge: "TransformerBridge") -> tuple[PreTrainedModel, Any]:
    """The transformers model behind a bridge, and the bridge's tokenizer; the bridge keeps working.

    TransformerLens gives its tokenizers a BOS in front even where the model's own has none: where that matters, bring the own one along.

    Raises:
        InputError: the bridge wraps no transformers model, ``enable_compatibility_mode()`` has changed its weights, or its logits are not those
            of its weights, because something is hooked or edited.
        UnsupportedModelError: the family is not supported.
    """
    original = bridge.original_model
    if not isinstance(original, PreTrainedModel):
        raise InputError(f"the TransformerBridge wraps a {type(original).__name__}, not a transformers model; boot it with boot_transformers")
    check_family(original.config.model_type)
    if getattr(bridge, "_weights_processed", False):
        raise InputError("the TransformerBridge's weights were folded by enable_compatibility_mode(); pass a freshly booted one, or no_processing=True")
    hf = twin(original)
    tokens = torch.arange(16, device=hf.device)[None] % hf.config.vocab_size
    with torch.no_grad():
        theirs, ours = bridge(tokens, return_type="logits").float(), hf(input_ids=tokens, use_cache=False).logits.float()
    error = float((ours - theirs).norm() / theirs.norm())
    if not error <= (0.05 if hf.dtype in (torch.float16, torch.bfloat16) else 1e-4):
        raise InputError(f"the TransformerBridge's logits differ from its model's by {error:.1e} (relative); remove its hooks and edits, or boot a fresh one")
    return hf, bridge.tokenizer


def from_nnsight(lm: "Envoy") -> tuple[PreTrainedModel, Any]:
    """The transformers model behind an nnsight model, and its tokenizer (``None`` for a plain ``NNsight``).

    An nnsight model that has not loaded its weights yet loads them now, as its first trace would. Its edits (``lm.edit``) stay behind.

    Raises:
        InputError: it wraps no transformers model, or one without weights.
        UnsupportedModelError: the family is not supported.
    """
    if hasattr(lm, "dispatch"):
        lm.dispatch()
    module = lm._module
    if not isinstance(module, PreTrainedModel):
        raise InputError(f"the nnsight object wraps a {type(module).__name__}, not a transformers model; pass the whole model, as NNsight(hf)")
    check_family(module.config.model_type)
    return twin(module), getattr(lm, "tokenizer", None)


def to_transformer_lens(model: "LensModel") -> "TransformerBridge":
    """A ``TransformerBridge`` on the model's own weights (not copied), raw, with eager attention; the model stays as it is.

    Raises:
        InputError: TransformerLens is not installed.
    """
    _require("transformer_lens")
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf = _named_twin(model)
    hf.set_attn_implementation("eager")  # the only one that passes scores and patterns through a bridge's hooks
    return build_bridge_from_module(hf, type(hf).__name__, hf_config=hf.config, tokenizer=copy.deepcopy(model.tokenizer), model_name=model.info.id)


def to_nnsight(model: "LensModel") -> "Envoy":
    """An nnsight ``TransformersModel`` on the model's own weights (not copied), or a plain ``NNsight`` for a model without tokenizer.

    Raises:
        InputError: nnsight is not installed.
    """
    _require("nnsight")
    import nnsight

    hf = _named_twin(model)
    if model.tokenizer is None:
        return nnsight.NNsight(hf)
    # A copy, because nnsight sets the tokenizer's padding.
    return nnsight.TransformersModel(hf, task="text-generation", tokenizer=copy.deepcopy(model.tokenizer))


def twin(hf: PreTrainedModel) -> PreTrainedModel:
    """Fresh modules of the same class and config, in eval mode, around the same memory; also of a model that a bridge has rewired.

    Parameters are new objects that share storage, ties included: replacing or moving the twin's, or their gradients, leaves ``hf`` alone.

    Raises:
        InputError: the weights are not loaded, or are not those of the class and config (adapters, quantised layers).
    """
    with torch.device("meta"):
        fresh = type(hf)(copy.deepcopy(hf.config))
    named = (*hf.named_parameters(remove_duplicate=False), *hf.named_buffers(remove_duplicate=False))
    theirs = {name.replace(_BRIDGED, ""): tensor for name, tensor in named}
    shared: dict[int, Tensor] = {}
    for path, module in fresh.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, expected in tensors.items():
                if expected is None:
                    continue
                full = f"{path}.{name}" if path else name
                tensor = theirs.get(full)
                if tensor is None or tensor.shape != expected.shape:
                    found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
                    raise InputError(f"{type(hf).__name__}: {full} {found}, expected {tuple(expected.shape)}; merge adapters and load without quantisation")
                if tensor.is_meta:
                    raise InputError(f"{type(hf).__name__}: {full} is on the meta device; load the weights first")
                tensors[name] = shared.setdefault(id(tensor), _same_memory(tensor))
    fresh.generation_config = copy.deepcopy(hf.generation_config)
    return fresh.eval()


def _named_twin(model: "LensModel") -> PreTrainedModel:
    hf = twin(model.hf)
    hf.config._name_or_path = model.info.id  # so that it has the same id when it comes back
    return hf


def _same_memory(tensor: Tensor) -> Tensor:
    return nn.Parameter(tensor.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else tensor.detach()


def _require(library: str) -> None:
    if find_spec(library) is None:
        raise InputError(f"{library} is not installed; pip install 'hydralens[lens]'")
