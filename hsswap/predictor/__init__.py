"""Predictors rank a sequence's blocks for a query. They decide; the device does the work."""

from hsswap.predictor.calibration import HeadSamples, calibrate
from hsswap.predictor.projection import ProjectionPredictor, projection_matrix

__all__ = ["HeadSamples", "ProjectionPredictor", "calibrate", "projection_matrix"]
