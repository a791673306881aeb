"""The HTTP service: models behind HTTP routes, with limits on memory and time."""
