"""Retrieval data: documents, queries, relevance judgments and rankings, in the formats of BEIR and TREC."""
