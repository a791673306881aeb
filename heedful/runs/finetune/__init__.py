"""Fine-tuning: settings, the plan of a run, initial models, methods, baselines, the run itself and its dry run."""
