"""File formats: lines, JSON, tables, CoNLL, SQuAD and labelled text, each read as a stream."""
