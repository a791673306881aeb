"""Plots of a run: training curves, and the quality of its model."""
