"""Tasks answer, learn and are measured: inputs to windows of tokens, a head's scores to plain data."""
