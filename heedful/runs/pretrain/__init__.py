"""Pre-training: settings, what is trained, the run, its probes and its teacher."""
