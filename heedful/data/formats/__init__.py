"""File formats, each read as a stream: lines, JSON, tables, CoNLL, SQuAD and labelled text."""
