"""Pages with a model in them: HTML files that answer in a browser, without a server and without a network."""
