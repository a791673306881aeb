"""Model cards: README.md of fine-tuned and pre-trained models, and its tables, which report.html shows too."""
