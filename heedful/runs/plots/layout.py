"""`RoundedLayout`: a layout engine of matplotlib with the same positions each time a figure is drawn."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

DIGITS = 9  # decimals of positions, which are fractions of the figure size


class RoundedLayout(ConstrainedLayoutEngine):
    """Constrained layout with rounded positions.

    Positions from matplotlib's solver (kiwisolver) differ in their last bits between calls. SVG files contain hashes of
    positions, so these files would differ too.
    """

    def execute(self, fig: Figure) -> None:
        """Lay out the figure."""
        super().execute(fig)
        for axes in fig.axes:
            in_layout = axes.get_in_layout()
            axes.set_position(np.round(axes.get_position(original=True).bounds, DIGITS).tolist())
            axes.set_in_layout(in_layout)  # set_position resets this flag
