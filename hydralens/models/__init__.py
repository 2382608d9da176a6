"""Opening a model and knowing its anatomy."""

from hydralens.models.anatomy import Anatomy, Layer
from hydralens.models.info import ModelInfo
from hydralens.models.lens import LensModel
from hydralens.models.loading import load_model

__all__ = ["Anatomy", "Layer", "LensModel", "ModelInfo", "load_model"]
