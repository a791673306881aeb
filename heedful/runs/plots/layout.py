"""A constrained layout whose positions are the same every time a figure is drawn."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

DIGITS = 9  # decimal places of positions, which are shares of the figure


class RoundedLayout(ConstrainedLayoutEngine):
    """Constrained layout with rounded positions.

    Positions from matplotlib's solver (kiwisolver) differ in their last bits from one call to the next. SVG files
    contain hashes of positions, so they would differ too.
    """

    def execute(self, fig: Figure) -> None:
        """Lay out the figure."""
        super().execute(fig)
        for axes in fig.axes:
            in_layout = axes.get_in_layout()
            axes.set_position(np.round(axes.get_position(original=True).bounds, DIGITS).tolist())
            axes.set_in_layout(in_layout)  # since set_position resets it
