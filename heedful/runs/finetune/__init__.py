"""Fine-tuning: settings, what is trained, the run and its dry run."""
