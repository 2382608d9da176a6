"""Head-wise hybrids: full attention for the heads of a mask, Gated DeltaNet for the others."""

from transformers import AutoConfig, AutoModelForCausalLM

from hydralens.hybrid.build import build_hybrid
from hydralens.hybrid.cache import HybridCache
from hydralens.hybrid.config import HydraHeadConfig
from hydralens.hybrid.decoding import Decoder
from hydralens.hybrid.modeling import HydraHeadForCausalLM
from hydralens.hybrid.recipes import RECIPES, published_mask

AutoConfig.register(HydraHeadConfig.model_type, HydraHeadConfig)
AutoModelForCausalLM.register(HydraHeadConfig, HydraHeadForCausalLM)

__all__ = ["RECIPES", "Decoder", "HybridCache", "HydraHeadConfig", "HydraHeadForCausalLM", "build_hybrid", "published_mask"]
