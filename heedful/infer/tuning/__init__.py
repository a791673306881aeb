"""How a model is computed fastest on this machine: execution plans, the precision, and what was measured."""
