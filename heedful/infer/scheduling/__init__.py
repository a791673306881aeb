"""The queue of a server: it batches the requests of many clients for one engine thread, within limits."""
