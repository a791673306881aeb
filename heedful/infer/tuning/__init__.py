"""How a model is computed fastest on this machine: execution plans, precisions, and a cache of measurements."""
