"""Layer 10: the commands that read data or write a run folder, such as finetune, pretrain, distil and evaluate."""
