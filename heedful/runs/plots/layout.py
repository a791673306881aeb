"""A constrained layout whose positions are the same each time."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

DIGITS = 9  # of positions, as shares of the figure


class RoundedLayout(ConstrainedLayoutEngine):
    """Constrained layout with rounded positions.

    Positions from the solver of matplotlib (kiwisolver) differ in their last bits from one time to the next, and SVG
    files have names that are hashes of positions.
    """

    def execute(self, fig: Figure) -> None:
        """Lay out the figure."""
        super().execute(fig)
        for axes in fig.axes:
            in_layout = axes.get_in_layout()
            axes.set_position(np.round(axes.get_position(original=True).bounds, DIGITS).tolist())
            axes.set_in_layout(in_layout)  # which set_position resets
