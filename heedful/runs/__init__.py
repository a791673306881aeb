"""The commands that read data or write a run folder: finetune, pretrain, distil, tune, evaluate, bench, push."""
