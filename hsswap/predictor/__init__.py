"""Predictors rank a sequence's blocks for a query. They decide; the device does the work."""

from hsswap.predictor.base import Predictor, ScoreRequest
from hsswap.predictor.calibration import HeadSamples, calibrate, stand_ins
from hsswap.predictor.codes import CodesPredictor
from hsswap.predictor.projection import ProjectionPredictor, projection_matrix
from hsswap.predictor.stand_in import StandIn

__all__ = [
    "CodesPredictor",
    "HeadSamples",
    "Predictor",
    "ProjectionPredictor",
    "ScoreRequest",
    "StandIn",
    "calibrate",
    "projection_matrix",
    "stand_ins",
]
