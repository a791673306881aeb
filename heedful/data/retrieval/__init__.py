"""Data of retrieval: documents, queries, relevance judgments and rankings, in BEIR's and TREC's formats."""
